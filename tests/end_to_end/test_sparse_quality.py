"""What zeros cost a trained model: its perplexity on the whole held-out text, by how they were chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from llmc.graph.capture import Captured, capture
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.stream import Stream
from llmc.passes.runner import run_pipeline
from llmc.passes.sparsity.sparsify import sparsify

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MODEL = EXAMPLES / "models" / "bard-6m"
WINDOW = 256


@pytest.fixture(scope="module")
def captured() -> Captured:
    options = parse_options({})
    found = capture(MODEL, options)
    return Captured(run_pipeline(found.graph, canonical(), options).graph, found.source)


@pytest.fixture(scope="module")
def heldout(captured: Captured) -> tuple[Tensor, ...]:
    """Windows of the whole text."""
    options = parse_options({"calibration": str(EXAMPLES / "data" / "heldout.txt"), "calibration_sequences": 65536})
    return calibration_sequences(captured.graph, options, _data(captured))


def _data(captured: Captured) -> ModelData:
    return ModelData(captured.source, MODEL / "tokenizer.json")


def _perplexity(captured: Captured, windows: tuple[Tensor, ...], sparsity: str) -> float:
    given = {"calibration": str(EXAMPLES / "data" / "calibration.txt"), "sparsity": sparsity}
    graph = run_pipeline(captured.graph, (sparsify,), parse_options(given), data=_data(captured)).graph
    total, tokens = 0.0, 0
    for some in (windows[i : i + 16] for i in range(0, len(windows), 16)):
        for ids, logits in zip(some, Stream(graph, captured.source, some).outputs(), strict=True):
            total += float(cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
            tokens += len(ids) - 1
    return float(torch.tensor(total / tokens).exp())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["0.5", "2:4"])
def test_what_looks_at_more_keeps_more(captured: Captured, heldout: tuple[Tensor, ...], form: str) -> None:
    methods = ("magnitude", "wanda", "sparsegpt")
    found = {method: _perplexity(captured, heldout, f"{method}:{form}") for method in methods}
    assert found["sparsegpt"] < found["wanda"] < found["magnitude"]
    if form == "0.5":
        assert found["sparsegpt"] <= 1.06 * _perplexity(captured, heldout, "none")
