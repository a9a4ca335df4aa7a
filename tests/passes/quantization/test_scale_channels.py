"""AWQ and SmoothQuant scale channels without changing the model, and rounding does less harm after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.formats.scheme_text import parse_scheme
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.passes.quantization.scale_channels import scale_channels
from tests.passes.quantization.quantizing import calibration_file, captured_llama, logits, quantized

_NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight")
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def _with_outliers() -> Captured:
    """The same function with four channels of some norms 64 times as large."""
    given = captured_llama()
    tensors = {name: given.source.load(name).clone() for name in given.source.names()}
    for name in _NORMS:
        prefix, _, norm = name.removesuffix(".weight").rpartition(".")
        tensors[name][:4] *= 64
        for reader in _READERS[norm]:
            tensors[f"{prefix}.{reader}.weight"][:, :4] /= 64
    return Captured(given.graph, MemorySource(tensors))


@pytest.mark.parametrize("scheme", ["int4-awq:g32", "w8a8-smoothquant"])
def test_the_function_stays_the_same(scheme: str, tmp_path: Path) -> None:
    result = quantized(scheme, passes=(scale_channels,), calibration=calibration_file(tmp_path))
    # Two norms, the values and the inner channels of each layer, less what AWQ finds no gain in.
    assert 5 <= len(result.records[0].rewrites) <= 8
    torch.testing.assert_close(logits(result.graph), logits(captured_llama().graph), rtol=1e-3, atol=2e-4)


def test_smoothquant_rescues_outliers(tmp_path: Path) -> None:
    calibration, outliers = calibration_file(tmp_path), _with_outliers()
    reference = logits(captured_llama().graph)
    torch.testing.assert_close(logits(outliers.graph, outliers), reference, rtol=1e-3, atol=1e-3)
    plain, smooth = (
        (logits(quantized(s, captured=outliers, calibration=calibration).graph, outliers) - reference).square().mean()
        for s in ("w8a8", "w8a8-smoothquant")
    )
    assert float(smooth) < float(plain) / 20


def test_awq_lowers_the_error_of_products(tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    nearest = {w.module: w.error for w in quantized("int4:g32:asym", calibration=calibration).graph.quantized}
    awq = {w.module: w.error for w in quantized("int4-awq:g32", calibration=calibration).graph.quantized}
    better = [name for name in nearest if name != "lm_head" and (awq[name] or 1) < (nearest[name] or 0)]
    assert len(better) >= 12


def test_refuses_scales_that_do_no_good(tmp_path: Path) -> None:
    """Weights that int4 can say as they are lose by every scale."""
    given = captured_llama()
    tensors = {name: given.source.load(name).clone() for name in given.source.names()}
    scheme = parse_scheme("int4-awq:g32")
    assert scheme is not None
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        tensors[name] = round_to_nearest(tensors[name].float(), scheme).values()
    exact = Captured(given.graph, MemorySource(tensors))
    result = quantized("int4-awq:g32", passes=(scale_channels,), captured=exact, calibration=calibration_file(tmp_path))
    assert not result.records[0].rewrites
    assert any("no scales of" in r.reason for r in result.records[0].refusals)


def test_refuses_channels_that_others_read(tmp_path: Path) -> None:
    result = quantized("int4-awq:g32,up_proj=none", passes=(scale_channels,), calibration=calibration_file(tmp_path))
    reasons = [r.reason for r in result.records[0].refusals]
    assert any("which is not scaled" in reason for reason in reasons)


def test_refuses_norms_that_share_a_weight(tmp_path: Path) -> None:
    given = captured_llama()
    graph = given.graph.copy()
    first, second = (n for n in graph.weight_nodes() if n.name.endswith("input_layernorm_weight"))
    second.replace_all_uses_with(first)
    result = quantized(
        "int4-awq:g32",
        passes=(scale_channels,),
        captured=Captured(graph, given.source),
        calibration=calibration_file(tmp_path),
    )
    assert f"{first.name} is used by 2 nodes" in [r.reason for r in result.records[0].refusals]


def test_refuses_products_of_two_methods(tmp_path: Path) -> None:
    result = quantized(
        "int4-awq:g32,up_proj=w8a8-smoothquant", passes=(scale_channels,), calibration=calibration_file(tmp_path)
    )
    assert any("different methods" in r.reason for r in result.records[0].refusals)
