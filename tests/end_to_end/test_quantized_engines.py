"""Engines of calibrated schemes and of quantized checkpoints compute what their reference graphs do: dequantize, then
fp32. codegen/test_quantized_engine.py has the schemes without calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import llmc
from tests.passes.quantization.quantizing import TOKENS, calibration_file, logits, quantized
from tests.quantized_checkpoints import GROUP, Writer, awq_writer, gptq_writer, tiny_llama, write_quantized

# Sums in another order move a token's value by 1e-7 of it; where that crosses the middle between two codes, the code
# changes, and with it the output by a step of the activations' format.
_FP32, _CODES_OF_TOKENS = 2e-5, 2e-2
_SCHEMES = {
    "int4-gptq:g32": _FP32,
    "int4-awq:g32": _FP32,
    "w4a8-gptq:g32": _CODES_OF_TOKENS,
    "w8a8:static": _CODES_OF_TOKENS,
    "w8a8-smoothquant": _CODES_OF_TOKENS,
    "fp8-w8a8:static": _CODES_OF_TOKENS,
}


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_agrees_with_its_reference_graph(scheme: str, tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    expected = logits(quantized(scheme, calibration=calibration).graph)
    with llmc.compile(
        tiny_llama(), target="cpu", quantize=scheme, calibration=calibration, calibration_length=64
    ) as engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    assert float((found - expected).abs().max() / expected.std()) < _SCHEMES[scheme]


_AWQ: dict[str, Any] = {"quant_method": "awq", "zero_point": True, "version": "gemm"}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "desc_act": True, "sym": False, "checkpoint_format": "gptq"}


@pytest.mark.parametrize(
    ("config", "writer"), [(_AWQ, awq_writer), (_GPTQ, gptq_writer(symmetric=False, act_order=True, stored_offset=1))]
)
def test_runs_a_checkpoint_of_codes(config: dict[str, Any], writer: Writer, tmp_path: Path) -> None:
    model = tiny_llama()
    described = config | {"bits": 4, "group_size": GROUP}
    model.load_state_dict(write_quantized(tmp_path, model, described, writer), strict=False)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with llmc.compile(tmp_path, target="cpu", dtype="float32") as engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
