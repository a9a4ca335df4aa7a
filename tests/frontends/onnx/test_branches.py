"""Branches on the length of a sequence, as onnxruntime-genai writes longrope: max_model_len says which one is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmc.errors import CaptureError
from llmc.frontends.onnx.capture import capture_onnx
from llmc.frontends.onnx.source import OnnxSource
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions
from tests.frontends.onnx.eager import TOKENS, assert_same
from tests.frontends.onnx.graphs import WIDTH, decoder, random, saved


def _model() -> onnx.ModelProto:
    """x·factor, a table in either branch, by whether there are more than 32 tokens."""
    result = helper.make_tensor_value_info("factor", TensorProto.FLOAT, None)
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Identity", [f"{name}_table"], [f"{name}_factor"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_factor", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(random(WIDTH, seed=seed), f"{name}_table")],
        )
        for name, seed in (("then", 1), ("else", 2))
    }
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["shape"], start=1, end=2),
        helper.make_node("Squeeze", ["shape"], ["length"]),
        helper.make_node("Greater", ["length", "limit"], ["is_long"]),
        helper.make_node("If", ["is_long"], [result.name], name="choice", **branches),
        helper.make_node("Mul", ["x", result.name], ["y"]),
    ]
    return decoder(nodes, {"limit": np.asarray(32, np.int64)}, result="y")


def test_the_branch_of_sequences_that_are_built_for(tmp_path: Path) -> None:
    model = _model()
    table, head = (numpy_helper.to_array(initializer) for initializer in model.graph.initializer[:2])
    captured = capture_onnx(OnnxSource(saved(model, tmp_path)), BuildOptions(max_model_len=32))
    actual = run_tokens(captured.graph, captured.source, TOKENS).numpy()
    assert_same(actual, (table[list(TOKENS)] * random(WIDTH, seed=2)) @ head)


@pytest.mark.parametrize("longest", [None, 33])
def test_a_length_that_decides_nothing(longest: int | None, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="depends on the number of tokens") as caught:
        capture_onnx(OnnxSource(saved(_model(), tmp_path)), BuildOptions(max_model_len=longest))
    assert caught.value.fix is not None and "--max-model-len" in caught.value.fix
