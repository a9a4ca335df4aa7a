"""GPTQ and AWQ round each expert by the tokens that it was sent, and one that was sent none to the nearest."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.weights import evaluate
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, default
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.passes.quantization.quantizing import calibration_file, quantized
from tests.tiny_models import tiny_model

EXPERTS = 5


@functools.cache
def captured_mixtral() -> Captured:
    """Canonical. The last expert is no token's: of numbers s, −s, s/2, −s/2 and 0 the last is never among the two
    largest."""
    model = tiny_model("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=96)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router.copy_(torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0])[:, None] * router[:1])
    options = parse_options({})
    fresh = capture(model, options)
    return Captured(run_pipeline(fresh.graph, canonical(), options).graph, fresh.source)


def _quantized(scheme: str, directory: Path) -> PipelineResult:
    return quantized(f"*experts*={scheme}", captured=captured_mixtral(), calibration=calibration_file(directory))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_each_expert_is_rounded_by_its_own_tokens(method: str, tmp_path: Path) -> None:
    # Of AWQ, which is not symmetric, the scales are fitted to what each expert sees.
    plain = "int4:g32" if method == "gptq" else "int4:g32:asym"
    nearest = {w.module: w for w in _quantized(plain, tmp_path).graph.quantized}
    result = _quantized(f"int4-{method}:g32", tmp_path)
    assert len(nearest) == len(result.graph.quantized) == 4
    for record in result.graph.quantized:
        assert record.is_output_error
        assert record.error is not None
        assert record.error < (nearest[record.module].error or 0.0)
        assert record.reason == "1 expert of 5 saw no calibration token: rounded to the nearest"
        assert nearest[record.module].reason is None


def test_an_expert_without_tokens_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    captured, scheme = captured_mixtral(), parse_options({"quantize": "int4-gptq:g32"}).quantization.default
    assert scheme is not None
    result = _quantized("int4-gptq:g32", tmp_path)
    for name in captured.graph.weights:
        if f"{name}_codes" not in result.graph.weights:
            continue
        weight = evaluate(captured.graph.weights[name], captured.source)
        codes = evaluate(result.graph.weights[f"{name}_codes"], captured.source)
        expected = round_to_nearest(weight, scheme).codes
        last = len(weight) // EXPERTS * (EXPERTS - 1)
        assert torch.equal(codes[last:], expected[last:])
        assert not torch.equal(codes[:last], expected[:last])


def test_the_graph_runs_after_all_passes(tmp_path: Path) -> None:
    captured = captured_mixtral()
    options = parse_options(
        {"quantize": "int4-gptq:g32", "calibration": calibration_file(tmp_path), "calibration_length": 64}
    )
    result = run_pipeline(captured.graph, default()[len(canonical()) :], options, data=ModelData(captured.source))
    assert {w.scheme for w in result.graph.quantized} == {"int4-gptq:g32", "int8"}
