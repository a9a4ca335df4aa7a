"""Weights and tokens become codes, one rewrite a weight, and every graph on the way to the engine runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from llmc.errors import OptionError
from llmc.frontends.captured import Captured
from llmc.graph.render import op_name
from llmc.passes.quantization.quantize_weights import quantize_weights
from tests.passes.quantization.quantizing import (
    calibration_file,
    captured_llama,
    logit_error,
    logits,
    optimized,
    quantized,
)

# The root mean square error of normally distributed weights over theirs, at least and at most.
_ERRORS = {
    "int8": (0.004, 0.01),
    "int8:g32:asym": (0.003, 0.008),
    "int4:g32": (0.07, 0.12),
    "int4:g64:asym": (0.07, 0.12),
    "int4:channel": (0.09, 0.15),
    "w8a8": (0.004, 0.01),
    "w4a8:g32": (0.07, 0.12),
    "fp8": (0.02, 0.03),
    "fp8:tensor": (0.02, 0.03),
    "fp8-w8a8": (0.02, 0.03),
    "nf4": (0.07, 0.12),
    "mxfp4": (0.1, 0.15),
}


@pytest.mark.parametrize("scheme", _ERRORS)
def test_error_is_that_of_the_format(scheme: str) -> None:
    """As reported of each weight, and no more than a model of two layers amplifies in the logits."""
    result = quantized(scheme)
    least, most = _ERRORS[scheme]
    for weight in result.graph.quantized:
        assert weight.module == "lm_head" or least < (weight.error or 0) < most, weight
    assert logit_error(result.graph) < 8 * most


@pytest.mark.parametrize("scheme", ["int8", "int4:g32:asym", "w8a8", "fp8-w8a8:tensor", "nf4", "mxfp4"])
def test_quantized_kernels_compute_what_the_explicit_nodes_do(scheme: str) -> None:
    """Merges, fusions and the fusing of codes change nothing but the order of sums, in fp32."""
    explicit, fused = quantized(scheme), optimized(scheme)
    torch.testing.assert_close(logits(fused.graph), logits(explicit.graph), rtol=1e-4, atol=2e-4)
    ops = Counter(op_name(n.target) for n in fused.graph.graph.nodes if n.op == "call_function")
    assert ops["llmc.linear"] + ops["llmc.fused_linear"] == 6
    assert ops["llmc.gated_linear"] == 2
    assert ops["llmc.lm_head"] == 1
    assert ops["llmc.dequantize"] == 9
    assert bool(ops["llmc.round_tokens"]) is ("w8a8" in scheme)


def test_each_weight_is_one_numbered_rewrite() -> None:
    result = quantized("int8", passes=(quantize_weights,))
    (record,) = result.records
    assert [r.number for r in record.rewrites] == list(range(1, 16))
    assert record.rewrites[0].description == "model.layers.0.self_attn.q_proj to int8"
    again = quantized("int8", passes=(quantize_weights,), captured=Captured(result.graph, captured_llama().source))
    assert not again.records[0].rewrites


def test_a_cut_between_two_weights_leaves_a_graph_that_runs() -> None:
    whole = quantized("int4:g32")
    cut = quantized("int4:g32", stop_after=5)
    assert cut.was_cut
    assert len(cut.graph.quantized) == 5
    assert 0 < logit_error(cut.graph) < logit_error(whole.graph) * 1.5


def test_the_head_gets_eight_bits_unless_it_is_named() -> None:
    plain = {w.module: w.scheme for w in quantized("int4:g32").graph.quantized}
    assert plain["lm_head"] == "int8"
    named = {w.module: w.scheme for w in quantized("int4:g32,lm_head=nf4").graph.quantized}
    assert named["lm_head"] == "nf4"


def test_rules_choose_weights_and_leave_some_alone() -> None:
    schemes = {w.module: w.scheme for w in quantized("int8,down_proj=int4:g32,model.layers.1.*=none").graph.quantized}
    assert schemes["model.layers.0.mlp.down_proj"] == "int4:g32"
    assert schemes["model.layers.0.mlp.up_proj"] == "int8"
    assert not [name for name in schemes if name.startswith("model.layers.1.")]


def test_products_of_different_schemes_are_not_merged() -> None:
    result = optimized("int8,q_proj=int4:g32")
    refusals = [r.reason for record in result.records for r in record.refusals]
    assert any("[1] torch.float32" in reason and "[2] torch.bfloat16" in reason for reason in refusals)
    assert logit_error(result.graph) < 0.3


def test_static_scales_come_from_calibration(tmp_path: Path) -> None:
    result = quantized("w8a8:static", calibration=calibration_file(tmp_path))
    static = [n for n in result.graph.weights if n.endswith("_scale")]
    assert len(static) == 9  # four inputs a layer, and the head's
    assert logit_error(result.graph) < 0.2


def test_gptq_beats_rounding_to_nearest_on_its_own_measure(tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    nearest = {w.module: w.error for w in quantized("int4:g32", calibration=calibration).graph.quantized}
    gptq = {w.module: w.error for w in quantized("int4-gptq:g32", calibration=calibration).graph.quantized}
    better = [name for name in nearest if name != "lm_head" and (gptq[name] or 1) < (nearest[name] or 0)]
    assert len(better) >= 13


def test_the_same_build_twice_makes_the_same_codes(tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    first, second = (quantized("int4-gptq:g32", calibration=calibration).graph for _ in range(2))
    assert torch.equal(logits(first), logits(second))


def test_errors_name_the_tensor_whose_columns_a_group_does_not_divide() -> None:
    with pytest.raises(OptionError) as caught:
        quantized("int4:g128")
    assert "model.layers.0.self_attn.q_proj.weight has 64 columns" in caught.value.problem
    assert "groups of 128" in caught.value.problem


def test_names_a_rule_that_matches_nothing() -> None:
    with pytest.raises(OptionError, match="no weight is called 'donw_proj'") as caught:
        quantized("int8,donw_proj=none")
    assert caught.value.fix is not None
    assert "did you mean down_proj?" in caught.value.fix


def test_gptq_wants_text() -> None:
    with pytest.raises(OptionError, match="no calibration text is given"):
        quantized("int4-gptq:g32")


def test_refuses_calibration_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="too short: 100 tokens"):
        quantized("int4-gptq:g32", calibration=calibration_file(tmp_path, 100))
