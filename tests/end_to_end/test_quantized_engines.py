"""Engines of calibrated schemes and of quantized checkpoints compute what their reference graphs do: dequantize, then
fp32. codegen/test_quantized_engine.py has the schemes without calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llmc
from tests.passes.quantization.quantizing import TOKENS, calibration_file, logits, quantized
from tests.quantized_checkpoints import GROUP, Writer, awq_writer, gptq_writer, tiny_llama, write_quantized
from tests.quick_sample import quick_sample

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


# GPTQ and static scales are in others of these, and each format in tests/codegen/test_quantized_engine.py.
_QUICK = ("int4-awq:g32", "w8a8:static")


@pytest.mark.parametrize("scheme", quick_sample(_SCHEMES, _QUICK))
def test_agrees_with_its_reference_graph(scheme: str, tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path)
    expected = logits(quantized(scheme, calibration=calibration).graph)
    tiny_llama().save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"quantize": scheme, "calibration": calibration, "calibration_length": 64}
    with llmc.compile(tmp_path / "model", target="cpu", **options) as engine:
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


_BLOCK = (48, 32)


def _blocks(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 codes with a scale for each block; some weights' rows end within one."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // _BLOCK[0]), columns // _BLOCK[1])
    codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * _BLOCK[0], (i + 1) * _BLOCK[0]), slice(j * _BLOCK[1], (j + 1) * _BLOCK[1])
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scale[i, j]
    return {"weight": codes, "weight_scale": scale}, values


@pytest.mark.parametrize("target", quick_sample(["cpu", "reference"], ["cpu"]))
def test_builds_a_compressed_tensors_directory(target: str, tmp_path: Path) -> None:
    model, directory = tiny_llama(), tmp_path / "model"
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(_BLOCK)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    model.load_state_dict(write_quantized(directory, model, config, _blocks), strict=False)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    report = llmc.build(directory, tmp_path / "engine.llmc", target=target, dtype="float32")
    with llmc.load(report.path) as engine:
        found = torch.from_numpy(engine.logits(TOKENS))
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
