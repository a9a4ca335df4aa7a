"""Experts of quantized checkpoints go into graphs as they are stored: gpt-oss's MXFP4, and a matrix for each expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import llmc
from llmc.errors import CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.graph.execute import run_tokens
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.expert_blocks import tiny_gpt_oss, write_blocks
from tests.passes.quantization.test_read_codes import WEIGHT_ONLY
from tests.quantized_checkpoints import write_quantized
from tests.tiny_models import FAMILIES, tiny_model

_TOKENS = tuple((7 * i + 3) % 96 for i in range(19))
slow = pytest.mark.slow


def _optimized(directory: Path) -> tuple[Tensor, PipelineResult]:
    options = parse_options({"dtype": "float32"})
    captured = capture(directory, options)
    result = run_pipeline(captured.graph, default(), options, data=ModelData(captured.source))
    return run_tokens(result.graph, captured.source, _TOKENS), result


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([_TOKENS])).logits[0]
    return logits


def _coded_experts(result: PipelineResult) -> list[str]:
    """The recipes of the codes of all products of experts."""
    names = []
    for node in result.graph.graph.nodes:
        if str(node.target) == "llmc.expert_linear.default":
            assert str(node.args[1].target) == "llmc.dequantize.default"
            names.append(str(result.graph.weights[node.args[1].args[0].name]))
    return names


def test_blocks_of_gpt_oss_are_taken_as_they_are(tmp_path: Path) -> None:
    model = tiny_gpt_oss()
    meant = write_blocks(tmp_path, model)
    model.load_state_dict(meant, strict=False)
    source = QuantizedSource(tmp_path)
    for name, expected in meant.items():
        assert torch.equal(source.load(name), expected)
    actual, result = _optimized(tmp_path)
    torch.testing.assert_close(actual, _logits(model), rtol=1e-4, atol=1e-4)
    codes = _coded_experts(result)
    assert len(codes) == 4
    assert all("::codes" in code for code in codes)
    assert {record.scheme for record in result.graph.quantized} == {"mxfp4 mxfp4"}


def test_names_blocks_without_their_scales(tmp_path: Path) -> None:
    write_blocks(tmp_path, tiny_gpt_oss())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales' is missing"):
        QuantizedSource(tmp_path)


@slow
def test_an_engine_of_gpt_oss_says_what_its_blocks_say(tmp_path: Path) -> None:
    model = tiny_gpt_oss()
    model.load_state_dict(write_blocks(tmp_path, model), strict=False)
    expected = _logits(model)
    with llmc.compile(tmp_path, target="cpu", dtype="float32") as engine:
        actual = torch.as_tensor(engine.logits(list(_TOKENS)))
    assert float((actual - expected).abs().max() / expected.std()) < 1e-3


def _mixture(directory: Path, name: str, **overrides: Any) -> Any:
    """With the weights that its codes stand for; they are stored for each expert."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    sizes = {**FAMILIES["llama"], **experts, "norm_topk_prob": True, "head_dim": 16, **overrides}
    model = tiny_model("qwen3_moe", **{"hidden_size": 64, "intermediate_size": 128, **sizes})
    config, writer = WEIGHT_ONLY[name]
    write: Callable[..., Any] = writer()
    dequantized = write_quantized(directory, model, config, write)
    state = model.state_dict()
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([dequantized.pop(f"{place}{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        }
        state[f"{place}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        state[f"{place}down_proj"] = parts["down"]
    model.load_state_dict(state | dequantized)
    return model


_QUICK = ("gptq asymmetric", "float channels")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case, marks=() if case in _QUICK else slow)
        for case in WEIGHT_ONLY
        if case not in ("gptq act-order", "several groups")
    ],
)
def test_codes_of_each_expert_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    model = _mixture(tmp_path, name)
    actual, result = _optimized(tmp_path)
    torch.testing.assert_close(actual, _logits(model), rtol=1e-4, atol=1e-4)
    codes = _coded_experts(result)
    assert len(codes) == 4
    assert all("experts.3." in code and "::codes" in code for code in codes)


def test_experts_with_orders_of_their_own_are_not_taken_as_codes(tmp_path: Path) -> None:
    """Each would want its input in another order: their numbers are taken."""
    model = _mixture(tmp_path, "gptq act-order")
    actual, result = _optimized(tmp_path)
    torch.testing.assert_close(actual, _logits(model), rtol=1e-4, atol=1e-4)
    experts = [n for n in result.graph.graph.nodes if str(n.target) == "llmc.expert_linear.default"]
    assert all(n.args[1].op == "placeholder" for n in experts)
