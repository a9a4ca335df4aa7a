"""A budget of bits is kept and goes to the sensitive weights of the shipped model, and the reasons are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import OptionError
from llmc.graph.capture import Captured, capture
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, quantization
from llmc.passes.runner import PipelineResult, run_pipeline

_EXAMPLES = Path(__file__).parents[3] / "examples"
_MODEL = _EXAMPLES / "models" / "bard-draft"


@pytest.fixture(scope="module")
def bard() -> Captured:
    options = parse_options({})
    captured = capture(_MODEL, options)
    return Captured(run_pipeline(captured.graph, canonical(), options).graph, captured.source)


def _quantized(bard: Captured, quantize: str) -> PipelineResult:
    options = parse_options({"quantize": quantize, "calibration": str(_EXAMPLES / "data" / "calibration.txt")})
    data = ModelData(bard.source, _MODEL / "tokenizer.json")
    return run_pipeline(bard.graph, quantization(), options, data=data)


def test_spends_the_budget_on_what_is_sensitive(bard: Captured) -> None:
    weights = _quantized(bard, "auto:5").graph.quantized
    elements = sum(w.rows * w.columns for w in weights)
    assert 4.2 < sum(w.bits * w.rows * w.columns for w in weights) / elements <= 5.0
    assert {w.scheme for w in weights} == {"int4", "int8"}
    divergences = {w.module: float((w.reason or "").split()[1]) for w in weights}
    assert all("in sensitivity" in (w.reason or "") for w in weights)
    raised = [w for w in weights if w.scheme == "int8"]
    left = [w for w in weights if w.scheme == "int4"]
    assert max(divergences[w.module] for w in raised) > sum(divergences[w.module] for w in left) / len(left)


def test_leaves_rules_alone_and_counts_their_bits(bard: Captured) -> None:
    weights = _quantized(bard, "auto:7,lm_head=int8").graph.quantized
    elements = sum(w.rows * w.columns for w in weights)
    assert next(w for w in weights if w.module == "lm_head").reason is None
    assert sum(w.bits * w.rows * w.columns for w in weights) / elements <= 7.0


def test_says_what_the_least_budget_is(bard: Captured) -> None:
    with pytest.raises(OptionError, match=r"all at 4 bits, with scales, take 4\.1") as caught:
        _quantized(bard, "auto:4.05")
    assert caught.value.fix == "give at least auto:4.13"
