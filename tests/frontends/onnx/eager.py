"""What llmc makes of an ONNX file, run at once, for comparison with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import llmc.ops  # noqa: F401  (registers what translations call)
from llmc.frontends.onnx.capture import capture_onnx
from llmc.frontends.onnx.source import OnnxSource
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def captured_logits(file: Path, tokens: tuple[int, ...] = TOKENS) -> NDArray[Any]:
    """Of the captured graph, [tokens, vocabulary]."""
    captured = capture_onnx(OnnxSource(file), BuildOptions())
    logits: NDArray[Any] = run_tokens(captured.graph, captured.source, tokens).numpy()
    return logits


def onnxruntime_logits(file: Path, tokens: tuple[int, ...] = TOKENS) -> NDArray[Any]:
    """Of the file, with nothing in its cache."""
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    # Else it rounds what it multiplies with codes to 8 bits.
    quiet.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(file), quiet, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    for input_ in session.get_inputs():
        if input_.name == "input_ids":
            feeds[input_.name] = np.asarray([tokens])
        elif input_.name == "position_ids":
            feeds[input_.name] = np.arange(len(tokens))[None]
        elif input_.name == "attention_mask":
            feeds[input_.name] = np.ones((1, len(tokens)), np.int64)
        else:
            feeds[input_.name] = np.zeros((1, input_.shape[1], 0, input_.shape[3]), np.float32)
    logits: NDArray[Any] = session.run(["logits"], feeds)[0][0]
    return logits


def assert_as_onnxruntime(file: Path) -> None:
    """llmc and onnxruntime compute the same of a file."""
    assert_same(captured_logits(file), onnxruntime_logits(file))


def assert_same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """By the spread of logits."""
    spread = float(expected.max() - expected.min())
    assert spread > 0.1
    assert float(np.abs(found - expected).max()) <= 1e-5 * spread
