"""Each scheme's CPU engine computes what its reference graph does: dequantize, then fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llmc
from tests.passes.quantization.quantizing import TOKENS, calibration_file, logits, optimized, quantized
from tests.quantized_checkpoints import GROUP, awq_writer, tiny_llama, write_quantized

# Sums in another order move a token's value by 1e-7 of it; where that crosses the middle between two codes, the code
# changes, and with it the output by a step of the activations' format.
_FP32, _CODES_OF_TOKENS = 2e-5, 2e-2
_SCHEMES = {
    "int8": _FP32,
    "int8:g64:asym": _FP32,
    "int4:g32": _FP32,
    "int4:g64:asym": _FP32,
    "int4-gptq:g32": _FP32,
    "int4-awq:g32": _FP32,
    "fp8": _FP32,
    "nf4": _FP32,
    "mxfp4": _FP32,
    "w8a8": _CODES_OF_TOKENS,
    "w8a8:static": _CODES_OF_TOKENS,
    "w4a8:g32": _CODES_OF_TOKENS,
    "fp8-w8a8": 2 * _CODES_OF_TOKENS,
}


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_agrees_with_its_reference_graph(scheme: str, tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    options = {"calibration": calibration} if any(w in scheme for w in ("gptq", "awq", "static")) else {}
    expected = logits(quantized(scheme, **options).graph)
    engine = llmc.compile(tiny_llama(), target="cpu", quantize=scheme, calibration_length=64, **options)
    with engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    assert float((found - expected).abs().max() / expected.std()) < _SCHEMES[scheme]


@pytest.mark.parametrize("format", ["int8", "int4:head", "fp8"])
def test_agrees_with_coded_caches(format: str) -> None:
    expected = logits(optimized("", kv_cache=format).graph)
    with llmc.compile(tiny_llama(), target="cpu", kv_cache=format) as engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    # A key's code may change as a token's does above.
    assert float((found - expected).abs().max() / expected.std()) < _CODES_OF_TOKENS


def test_runs_a_checkpoint_of_codes(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    model = tiny_llama()
    model.load_state_dict(write_quantized(tmp_path, model, config, awq_writer), strict=False)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with llmc.compile(tmp_path, target="cpu", dtype="float32") as engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
