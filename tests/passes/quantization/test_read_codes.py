"""Quantized checkpoints go into graphs as they are: the same weights as their library's, the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.graph.execute import run_tokens
from llmc.graph.weights import Constant
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, default, quantization
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.program.step_outputs import DRAFT_IDS
from tests.medusa_heads import medusa_1
from tests.passes.quantization.quantizing import captured_llama
from tests.quantized_checkpoints import (
    GROUP,
    Writer,
    awq_writer,
    by_module,
    compressed_writer,
    fp4_writer,
    gptq_writer,
    tiny_llama,
    write_quantized,
)

_TOKENS = tuple((7 * i + 3) % 96 for i in range(19))


def _weights(bits: int, kind: str = "int", strategy: str = "group", symmetric: bool = True) -> dict[str, Any]:
    group = GROUP if strategy == "group" else None
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": symmetric}


def _dynamic(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> tuple[Any, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return config, lambda: compressed_writer(group, format)


def _fp4(format: str, group: int) -> tuple[Any, Any]:
    config, _ = _compressed(format, _weights(4, "float") | {"group_size": group})
    return config, lambda: fp4_writer(config["config_groups"]["group_0"], format)


def _several_groups() -> tuple[Any, Any]:
    """A format of its own for each group: named, by an expression, and for what is left."""
    named, matched, left = (
        _compressed("pack-quantized", _weights(4)),
        _compressed("float-quantized", _weights(8, "float", "channel")),
        _fp4("mxfp4-pack-quantized", GROUP),
    )
    targets = (
        [f"model.layers.{i}.self_attn.o_proj" for i in range(2)],
        ["re:.*down_proj"],
        ["Linear"],
    )
    groups = {
        f"group_{i}": config["config_groups"]["group_0"] | {"targets": target, "format": config["format"]}
        for i, ((config, _), target) in enumerate(zip((named, matched, left), targets, strict=True))
    }
    config = left[0] | {"format": "mixed-precision", "config_groups": groups}
    return config, lambda: by_module({"o_proj": named[1](), "down_proj": matched[1](), "": left[1]()})


def _gptq(version: str, *, bits: int = 4, symmetric: bool = True, act_order: bool = False) -> tuple[Any, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": symmetric}
    offset = 1 if version == "gptq" else 0
    return config | {"checkpoint_format": version}, lambda: gptq_writer(
        symmetric=symmetric, act_order=act_order, stored_offset=offset, bits=bits
    )


_AWQ = ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, None)
WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": _gptq("gptq"),
    "gptq asymmetric": _gptq("gptq", symmetric=False),
    "gptq v2": _gptq("gptq_v2", symmetric=False),
    "gptq act-order": _gptq("gptq", symmetric=False, act_order=True),
    "gptq 8 bits": _gptq("gptq", bits=8),
    "awq": (_AWQ[0], lambda: awq_writer),
    "packed int4": _compressed("pack-quantized", _weights(4)),
    "packed int4 asymmetric": _compressed("pack-quantized", _weights(4, symmetric=False)),
    "packed int8 channels": _compressed("pack-quantized", _weights(8, strategy="channel")),
    "int8 channels": _compressed("int-quantized", _weights(8, strategy="channel")),
    "float channels": _compressed("float-quantized", _weights(8, "float", "channel")),
    "float tensor": _compressed("float-quantized", _weights(8, "float", "tensor")),
    "mxfp4": _fp4("mxfp4-pack-quantized", 32),
    "nvfp4": _fp4("nvfp4-pack-quantized", 16),
    "several groups": _several_groups(),
}


def _written(directory: Path, config: dict[str, Any], writer: Writer) -> tuple[Any, dict[str, Tensor]]:
    """A quantized checkpoint; the model with the weights that it stands for, and those."""
    model = tiny_llama()
    dequantized = write_quantized(directory, model, config, writer)
    model.load_state_dict(dequantized, strict=False)
    return model, dequantized


def _optimized(directory: Path) -> tuple[Captured, PipelineResult]:
    """The graph of the checkpoint, which is that of the model, captured once."""
    captured = Captured(captured_llama().graph, QuantizedSource(directory))
    passes = default()[len(canonical()) :]
    return captured, run_pipeline(captured.graph, passes, parse_options({}), data=ModelData(captured.source))


def _captured_and_optimized(directory: Path, **options: Any) -> tuple[Captured, PipelineResult]:
    parsed = parse_options(options)
    captured = capture(directory, parsed)
    return captured, run_pipeline(captured.graph, default(), parsed, data=ModelData(captured.source))


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_and_logits_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    config, writer = WEIGHT_ONLY[name]
    model, dequantized = _written(tmp_path, config, writer())
    captured, result = _optimized(tmp_path)
    for stored, expected in dequantized.items():
        torch.testing.assert_close(captured.source.load(stored), expected, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        expected = model(torch.tensor([_TOKENS])).logits[0]
    logits = run_tokens(result.graph, captured.source, _TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    targets = [str(n.target) for n in result.graph.graph.nodes]
    assert targets.count("llmc.dequantize.default") == 8  # qkv, o, gate with up, and down of two layers
    assert targets.count("llmc.gated_linear.default") == 2
    assert len(result.graph.quantized) == 14
    assert ("llmc.select_channels.default" in targets) == ("act-order" in name)


def test_codes_are_not_rounded_again(tmp_path: Path) -> None:
    """The placeholder of the codes is read from the file, not made from dequantized weights."""
    _written(tmp_path, *_AWQ[:1], awq_writer)
    captured, result = _captured_and_optimized(tmp_path)
    codes = [n for n in result.graph.weights if n.endswith("o_proj_weight_codes")]
    assert len(codes) == 2
    assert "::codes" in str(result.graph.weights[codes[0]])
    assert captured.source.load("model.layers.0.self_attn.o_proj.weight::codes").dtype is torch.int8


@pytest.mark.parametrize("kind", ["int", "float"])
def test_rounds_activations_as_the_checkpoint_asks(kind: str, tmp_path: Path) -> None:
    format = f"{kind}-quantized"
    config, writer = _compressed(format, _weights(8, kind, "channel"), _dynamic(kind))
    _written(tmp_path, config, writer())
    captured, result = _optimized(tmp_path)
    rounded = [n for n in result.graph.graph.nodes if str(n.target) == "llmc.round_tokens.default"]
    assert {n.args[2] for n in rounded} == {"int8" if kind == "int" else "fp8"}
    assert torch.isfinite(run_tokens(result.graph, captured.source, _TOKENS)).all()


def test_reads_a_static_scale(tmp_path: Path) -> None:
    static = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config, writer = _compressed("int-quantized", _weights(8, strategy="channel"), static)
    _written(tmp_path, config, writer())
    _, result = _optimized(tmp_path)
    scales = [recipe for name, recipe in result.graph.weights.items() if name.endswith("_scale")]
    assert scales
    assert all(isinstance(scale, Constant) and float(scale.value) == pytest.approx(0.05) for scale in scales)


def test_quantizes_what_the_checkpoint_left(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0], awq_writer)
    _, result = _captured_and_optimized(tmp_path, quantize="lm_head=int8")
    assert [w.scheme for w in result.graph.quantized][-1] == "int8"
    (head,) = (n for n in result.graph.graph.nodes if str(n.target) == "llmc.lm_head.default")
    assert str(head.args[1].target) == "llmc.dequantize.default"


def test_names_the_weight_whose_scales_hold_nan(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0], awq_writer)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.scales"][0, 3] = float("nan")

    _edit(tmp_path, spoil)
    captured = Captured(captured_llama().graph, QuantizedSource(tmp_path))
    problem = r"the codes of 'model\.layers\.1\.mlp\.up_proj\.weight' .*: 1 of \d+ scales \(torch\.float16\) are NaN"
    with pytest.raises(CheckpointError, match=problem):
        run_pipeline(captured.graph, quantization(), parse_options({}), data=ModelData(captured.source))


def test_names_an_unknown_method(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0] | {"quant_method": "hqq"}, awq_writer)
    with pytest.raises(CheckpointError, match="quantized by 'hqq'"):
        QuantizedSource(tmp_path)


def test_names_a_module_that_no_group_is_for(tmp_path: Path) -> None:
    config, writer = _compressed("float-quantized", _weights(8, "float", "channel"))
    config["config_groups"]["group_0"]["targets"] = ["re:.*(self_attn|up|gate).*"]
    _written(tmp_path, config, writer())
    with pytest.raises(CheckpointError, match=r"down_proj has .*, but no config group is for it"):
        QuantizedSource(tmp_path)


def test_names_a_missing_tensor(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0], awq_writer)
    _edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(CheckpointError, match=r"but no model\.layers\.1\.mlp\.up_proj\.scales"):
        QuantizedSource(tmp_path)


def test_names_an_unexpected_tensor(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0], awq_writer)
    _edit(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.global_scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.layers\.1\.mlp\.up_proj\.global_scale'"):
        QuantizedSource(tmp_path)


def test_names_a_version_that_is_not_read(tmp_path: Path) -> None:
    _written(tmp_path, _AWQ[0] | {"version": "gemv"}, awq_writer)
    with pytest.raises(CheckpointError, match="version 'gemv' is not read"):
        QuantizedSource(tmp_path)


def test_says_that_groups_are_unequal(tmp_path: Path) -> None:
    config, writer = _gptq("gptq")
    _written(tmp_path, config, writer())

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.g_idx"][:3] = 1

    _edit(tmp_path, spoil)
    with pytest.raises(CheckpointError, match="g_idx gives groups"):
        QuantizedSource(tmp_path).load("model.layers.0.mlp.up_proj.weight")


def _edit(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert json.loads((directory / "config.json").read_text())["quantization_config"]


def test_codes_are_taken_beside_heads_that_draft(tmp_path: Path) -> None:
    config, writer = _gptq("gptq")
    _written(tmp_path / "model", config, writer())
    medusa_1(tmp_path / "heads.safetensors", 64)
    _, result = _captured_and_optimized(tmp_path / "model", speculative=str(tmp_path / "heads.safetensors"))
    assert {record.scheme for record in result.graph.quantized} == {"gptq int4"}
    assert DRAFT_IDS in result.graph.side_outputs
