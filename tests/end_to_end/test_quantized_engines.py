"""Engines of calibrated schemes and of quantized checkpoints compute what their reference graphs do: dequantize, then
fp32. codegen/test_quantized_engine.py has the schemes without calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from tests.passes.quantization.quantizing import TOKENS, calibration_file, logits, quantized
from tests.quantized_checkpoints import (
    GROUP,
    Writer,
    awq_writer,
    by_module,
    float8_writer,
    gptq_writer,
    llm_int8_writer,
    modelopt_fp4_writer,
    nf4_writer,
    tiny_llama,
    write_quantized,
)
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
        actual = torch.from_numpy(engine.logits(TOKENS))
    assert float((actual - expected).abs().max() / expected.std()) < _SCHEMES[scheme]


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
        actual = torch.from_numpy(engine.logits(TOKENS))
    assert float((actual - expected).abs().max() / expected.std()) < 1e-4


# Some weights' rows end within a block.
_BLOCK = (48, 32)
_E4M3 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(_BLOCK)}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _E4M3}}
DIRECTORIES: dict[str, tuple[dict[str, Any], Writer, set[str]]] = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": _GROUPS},
        float8_writer(_BLOCK),
        {"compressed-tensors fp8"},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": list(_BLOCK)},
        float8_writer(_BLOCK, "weight_scale_inv"),
        {"fp8 fp8"},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        by_module({"down_proj": float8_writer(None), "": modelopt_fp4_writer(16)}),
        {"modelopt mxfp4", "modelopt fp8"},
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes"},
        by_module({"down_proj": llm_int8_writer, "": nf4_writer(32, nested=True)}),
        {"bitsandbytes nf4", "bitsandbytes int8"},
    ),
}
_BUILDS = [(name, target) for name in DIRECTORIES for target in ("cpu", "reference")]


@pytest.mark.parametrize(
    ("name", "target"), quick_sample(_BUILDS, [("fp8", "cpu"), ("bitsandbytes", "reference"), ("modelopt", "cpu")])
)
def test_builds_a_directory_of_codes(name: str, target: str, tmp_path: Path) -> None:
    (config, writer, schemes), model, directory = DIRECTORIES[name], tiny_llama(), tmp_path / "model"
    model.load_state_dict(write_quantized(directory, model, config, writer), strict=False)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    report = llmc.build(directory, tmp_path / "engine.llmc", target=target, dtype="float32")
    assert {weight.scheme for weight in report.quantized} == schemes and len(report.quantized) == 14
    with llmc.load(report.path) as engine:
        actual = torch.from_numpy(engine.logits(TOKENS))
    assert float((actual - expected).abs().max() / expected.std()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_builds_float8_of_experts_and_latent_attention(family: str, tmp_path: Path) -> None:
    """As DeepSeek and Qwen publish it: each expert's matrix by itself, which the model and the engine have in one."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, config = tiny_architecture(family), {**DIRECTORIES["fp8"][0], "fmt": "e4m3", "activation_scheme": "dynamic"}
    dequantized = write_quantized(tmp_path / "codes", model, config, DIRECTORIES["fp8"][1])
    model.save_pretrained(tmp_path / "numbers")
    file = tmp_path / "numbers" / "model.safetensors"
    numbers = load_file(file)
    assert dequantized.keys() < numbers.keys()
    save_file(numbers | dequantized, file, metadata={"format": "pt"})
    with torch.no_grad():
        expected = auto.from_pretrained(tmp_path / "numbers")(torch.tensor([TOKENS])).logits[0]
    with llmc.compile(tmp_path / "codes", target="reference", dtype="float32") as engine:
        actual = torch.from_numpy(engine.logits(TOKENS))
    assert float((actual - expected).abs().max() / expected.std()) < 1e-4
