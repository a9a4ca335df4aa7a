"""Every layout of codes that is read: weights are what the layout's definition says, and what contradicts itself or is
not read is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.frontends.open_model import open_model
from tests.frontends.checkpoints import edit_json, edit_weights
from tests.quantized_checkpoints import (
    GROUP,
    Writer,
    awq_writer,
    by_module,
    float8_writer,
    gptq_writer,
    int8_rows_writer,
    llm_int8_writer,
    modelopt_fp4_writer,
    nf4_writer,
    tiny_llama,
    write_quantized,
)

_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}
_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_BITS_AND_BYTES: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def gptq(bits: int = 4, *, symmetric: bool = False, offset: int = 1) -> Writer:
    return gptq_writer(symmetric=symmetric, act_order=False, stored_offset=offset, bits=bits)


LAYOUTS: dict[str, tuple[dict[str, Any], Writer, set[str]]] = {
    # The config, what writes the weights, and the formats that codes are kept in.
    "gptq-2": (_GPTQ | {"bits": 2}, gptq(2), {"int4"}),
    "gptq-3": (_GPTQ | {"bits": 3}, gptq(3), {"int4"}),
    "gptq-v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(offset=0), {"int4"}),
    # As GPTQModel writes it since it renamed both keys.
    "gptq-format": ({"method": "gptq", "bits": 4, "format": "gptq_v2"}, gptq(offset=0), {"int4"}),
    "awq-middle": (
        {"quant_method": "awq", "w_bit": 4, "zero_point": False},
        partial(awq_writer, symmetric=True),
        {"int4"},
    ),
    "gptq-8": (_GPTQ | {"bits": 8}, gptq(8), {"int8"}),
    "gptq-dynamic": (
        _GPTQ
        | {
            "dynamic": {
                r"+:.*\.0\.mlp\.down_proj": {"bits": 8},
                r".*down_proj": {"bits": 3, "group_size": GROUP},
                r"-:.*lm_head": {},
            }
        },
        by_module({"0.mlp.down_proj": gptq(8), "down_proj": gptq(3), "": gptq()}),
        {"int8", "int4"},
    ),
    "auto-round-gptq": (_ROUND | {"packing_format": "auto_round:auto_gptq"}, gptq(symmetric=True), {"int4"}),
    "auto-round-zeros": (_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": False}, gptq(), {"int4"}),
    "auto-round-own": (_ROUND | {"packing_format": "auto_round", "sym": False}, gptq(offset=0), {"int4"}),
    "auto-round-gptqmodel": (
        _ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
        gptq(offset=0),
        {"int4"},
    ),
    "auto-round-intel": (_ROUND | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq"}, gptq(), {"int4"}),
    "auto-round-awq": (_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, awq_writer, {"int4"}),
    "auto-round-mixed": (
        _ROUND
        | {
            "packing_format": "auto_round:auto_gptq",
            "sym": False,
            "extra_config": {"model.layers.1.mlp.down_proj": {"bits": 8}, "lm_head": {"bits": 16}},
        },
        by_module({"1.mlp.down_proj": gptq(8), "": gptq()}),
        {"int8", "int4"},
    ),
    "auto-round-fp8": (
        _ROUND | {"packing_format": "auto_round:fp8_static"},
        float8_writer((1, 64)),
        {"fp8"},
    ),
    "fp8-blocks": (
        _FP8 | {"weight_block_size": [48, 32]},
        float8_writer((48, 32), "weight_scale_inv"),
        {"fp8"},
    ),
    "fp8-exponents": (
        _FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        float8_writer((32, 32), "weight_scale_inv", exponents=True),
        {"fp8"},
    ),
    "fp8-tensor": (
        _FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        float8_writer(None, "weight_scale_inv"),
        {"fp8"},
    ),
    "fp8-auto": ({"quant_method": "fp8", "activation_scheme": "static"}, float8_writer(None), {"fp8"}),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8_writer((1, 1 << 20)), {"fp8"}),
    "modelopt-fp8": (_MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, float8_writer(None), {"fp8"}),
    "modelopt-rows": (_MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, float8_writer((1, 1 << 20)), {"fp8"}),
    "modelopt-blocks": (_MODELOPT | {"quant_algo": "FP8_PB_WO"}, float8_writer((128, 128), axes=4), {"fp8"}),
    "modelopt-nvfp4": (_MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, modelopt_fp4_writer(16), {"mxfp4"}),
    "modelopt-mxfp4": (_MODELOPT | {"quant_algo": "W4A8_MXFP4_FP8"}, modelopt_fp4_writer(32), {"mxfp4"}),
    "modelopt-int8": (_MODELOPT | {"quant_algo": "W8A16"}, int8_rows_writer, {"int8"}),
    "modelopt-mixed": (
        _MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        by_module({"down_proj": modelopt_fp4_writer(16), "": float8_writer(None)}),
        {"mxfp4", "fp8"},
    ),
    "nf4": (_BITS_AND_BYTES, nf4_writer(64, nested=False), {"nf4"}),
    "nf4-nested": (_BITS_AND_BYTES, nf4_writer(32, nested=True), {"nf4"}),
    # Blocks that begin and end within rows.
    "nf4-across": (_BITS_AND_BYTES, nf4_writer(48, nested=False), {"nf4"}),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8_writer, {"int8"}),
}


def source_of(directory: Path) -> QuantizedSource:
    source = open_model(directory).weights
    assert isinstance(source, QuantizedSource)
    return source


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_is_what_its_layout_says(layout: str, tmp_path: Path) -> None:
    config, writer, formats = LAYOUTS[layout]
    dequantized = write_quantized(tmp_path, tiny_llama(), config, writer)
    source = source_of(tmp_path)
    assert len(dequantized) == 14
    for name, expected in dequantized.items():
        assert source.shape(name) == tuple(expected.shape)
        torch.testing.assert_close(source.load(name), expected, rtol=1e-6, atol=1e-7)
    assert {stored.format for name in dequantized if (stored := source.weight(name)) is not None} == formats
    assert set(source.names()) == set(tiny_llama().state_dict())


@pytest.mark.parametrize(
    ("file", "config", "writer"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt-fp8",
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "modelopt-nvfp4"),
        ("quantize_config.json", {"bits": 8, "group_size": GROUP, "desc_act": False}, "gptq-8"),
        ("quantization_config.json", _ROUND | {"packing_format": "auto_round:auto_gptq"}, "auto-round-gptq"),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
            "auto-round-awq",
        ),
    ],
)
def test_a_file_beside_the_config_may_describe_the_codes(
    file: str, config: dict[str, Any], writer: str, tmp_path: Path
) -> None:
    dequantized = write_quantized(tmp_path, tiny_llama(), config, LAYOUTS[writer][1], file_name=file)
    source = source_of(tmp_path)
    for name, expected in dequantized.items():
        torch.testing.assert_close(source.load(name), expected, rtol=1e-6, atol=1e-7)


def test_a_file_beside_the_config_that_names_no_codes_changes_nothing(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "quant_config.json").write_text(json.dumps({"note": "kept from an experiment"}))
    assert open_model(tmp_path).front_end.name == "safetensors"


def test_scales_of_activations_and_caches_are_no_weights(tmp_path: Path) -> None:
    write_quantized(tmp_path, tiny_llama(), *LAYOUTS["modelopt-fp8"][:2])
    vector = torch.ones(1)
    extra = {
        f"model.layers.{layer}.self_attn.{part}": vector.clone()
        for layer in (0, 1)
        for part in ("k_proj.k_scale", "v_proj.v_scale", "q_proj.input_scale", "k_scale", "v_scale")
    }
    edit_weights(tmp_path, lambda tensors: tensors | extra)
    source = source_of(tmp_path)
    assert set(source.names()) == set(tiny_llama().state_dict())
    assert "activations are meant to be rounded to e4m3: engines leave them as they are" in source.notes[0]


def _replaced(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Tensors of one module's, changed."""
    name = f"model.layers.1.mlp.up_proj.{suffix}"
    return lambda tensors: {**tensors, name: change(tensors[name])}


def _removed(suffix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: t for name, t in tensors.items() if name != f"model.layers.1.mlp.up_proj.{suffix}"}


def _state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        state = json.loads(bytes(tensor.tolist()))
        change(state)
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return changed


_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_LIST = torch.tensor(list(b"[[1]]"), dtype=torch.uint8)
CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "bits": ("gptq-8", _replaced("qzeros", lambda t: t[:, ::2].contiguous()), "4 bits per code, and bits says 8"),
    "rank": ("gptq-8", _replaced("qweight", lambda t: t.flatten()), r"qweight is \[2048\], not a matrix"),
    "rows": ("gptq-8", _replaced("scales", lambda t: t[:, :96].contiguous()), "do not fit together"),
    "no scale": ("fp8-blocks", _removed("weight_scale_inv"), "stored as F8_E4M3, .* no file says how"),
    "not float8": ("fp8-blocks", _replaced("weight", lambda t: t.bfloat16()), r"is BF16 .*, where codes are F8_E4M3"),
    "blocks": ("fp8-blocks", _replaced("weight_scale_inv", lambda t: t[:2].clone()), r"not of the weight \[128, 64\]"),
    "infinite": (
        "fp8-blocks",
        _replaced("weight_scale_inv", lambda t: t * torch.inf),
        r"\d+ of \d+ scales .* infinite",
    ),
    "nan": ("modelopt-nvfp4", _replaced("weight_scale_2", lambda t: t * torch.nan), "scales .* are NaN or infinite"),
    "nan codes": (
        "fp8-blocks",
        _replaced("weight", lambda t: torch.full_like(t.float(), torch.nan).to(torch.float8_e4m3fn)),
        "some of them are NaN",
    ),
    "half a scale": ("modelopt-nvfp4", _replaced("weight_scale", lambda t: t[:, :3].contiguous()), "the scales are"),
    "smoothed": (
        "modelopt-nvfp4",
        lambda tensors: tensors | {"model.layers.1.mlp.up_proj.pre_quant_scale": torch.ones(64)},
        r"pre_quant_scale\), which model.layers.1.mlp.up_proj has, is not read",
    ),
    "state": ("nf4", _replaced(_NF4_STATE, lambda t: t[3:].clone()), "is not a JSON object"),
    "state list": (
        "nf4",
        _replaced(_NF4_STATE, lambda t: torch.tensor(list(b"[[1]]"), dtype=torch.uint8)),
        "not a JSON",
    ),
    "no shape": ("nf4", _replaced(_NF4_STATE, _state(lambda s: s.pop("shape"))), "shape is None in weight.quant_state"),
    "shape": (
        "nf4",
        _replaced(_NF4_STATE, _state(lambda s: s.update(shape=[128, 65]))),
        r"has shape \[128, 65\]|codes",
    ),
    "block": ("nf4", _replaced(_NF4_STATE, _state(lambda s: s.update(blocksize=-64))), "blocksize is -64"),
    "no block": ("nf4", _replaced(_NF4_STATE, _state(lambda s: s.update(blocksize="64"))), "blocksize is '64'"),
    "table": ("nf4", _replaced("weight.quant_map", lambda t: t * 0.9), "not the table of NF4"),
    "absmax": ("nf4", _replaced("weight.absmax", lambda t: t[:-1].clone()), "absmax has 127 numbers for 8192 codes"),
    "nested": ("nf4-nested", _removed("weight.nested_quant_map"), "the table that they are in is missing"),
    "format": ("llm-int8", _replaced("weight_format", lambda t: t + 1), "in a GPU's order"),
    "SCB": ("llm-int8", _replaced("SCB", lambda t: t[:3].clone()), r"SCB \[3\]"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_tensors_that_contradict_each_other_are_named(name: str, tmp_path: Path) -> None:
    layout, change, problem = CONTRADICTIONS[name]
    write_quantized(tmp_path, tiny_llama(), *LAYOUTS[layout][:2])
    edit_weights(tmp_path, change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        source = source_of(tmp_path)
        source.check("model.layers.1.mlp.up_proj.weight", (128, 64), floating=True)
        source.load("model.layers.1.mlp.up_proj.weight")
    assert caught.value.at and caught.value.fix


def test_a_rule_that_contradicts_the_tensors_is_named(tmp_path: Path) -> None:
    config, _, _ = LAYOUTS["gptq-dynamic"]
    write_quantized(tmp_path, tiny_llama(), config, gptq())
    with pytest.raises(CheckpointError, match=r"4 bits per code, and dynamic\['.*down_proj'\] says \d"):
        source_of(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c["quantization_config"].update(dynamic={"-:.*up_proj": {}}))
    with pytest.raises(CheckpointError, match=r"up_proj has .*, but re:\.\*up_proj says that it is not quantized"):
        source_of(tmp_path)


def test_bitsandbytes_fp4_is_refused_with_the_command_that_does_the_same(tmp_path: Path) -> None:
    write_quantized(tmp_path, tiny_llama(), *LAYOUTS["nf4"][:2])
    edit_weights(tmp_path, lambda tensors: {name.replace("__nf4", "__fp4"): t for name, t in tensors.items()})
    with pytest.raises(CheckpointError, match=r"bitsandbytes' FP4, which .* has, is not read") as caught:
        source_of(tmp_path)
    assert "llmc build MODEL --quantize nf4" in str(caught.value.fix)


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"quant_method": "hqq", "bits": 4}, "quantized by 'hqq', which is not read", "--quantize int4"),
    ({"quant_method": "torchao"}, "quantized by 'torchao'", "--quantize int8"),
    ({"quant_method": "aqlm"}, "quantized by 'aqlm'", "--quantize int4-gptq"),
    ({"bits": 4}, "quantized by 'unknown'", "--quantize int4-gptq"),
    (_GPTQ | {"bits": 5}, "GPTQ with 5 bits is not read", "--quantize int4-gptq"),
    (_GPTQ | {"bits": "4"}, "GPTQ with '4' bits", "--quantize int4-gptq"),
    (_GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'", "gptq_v2"),
    (_GPTQ | {"checkpoint_format": None, "format": "bitblas"}, "GPTQ's format 'bitblas'", "gptq_v2"),
    (_GPTQ | {"format": "gptq_v2"}, "in two ways: checkpoint_format 'gptq' and format 'gptq_v2'", "config.json"),
    ({"method": "awq", "bits": 4, "format": "gemv"}, "AWQ with 4 bits in version 'gemv'", "4 bits"),
    (_GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, r"dynamic\['\+:\('\] is not a regular expression", "config.json"),
    (_GPTQ | {"dynamic": {"+:x": 8}}, r"dynamic\['\+:x'\] is 8, not an object", "config.json"),
    (_GPTQ | {"dynamic": ["x"]}, r"dynamic is \['x'\], not an object", "config.json"),
    ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits in version 'gemm'", "4 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ with 4 bits in version 'gemv'", "4 bits"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups", "one or more"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {}}}, "'g', which has no weights", "with weights"),
    (_FP8 | {"fmt": "e5m2"}, "float8 of the kind 'e5m2'", "e4m3"),
    (_FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]", "128, 128"),
    (_FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]", "128, 128"),
    (_MODELOPT | {"quant_algo": "W4A8_AWQ"}, "ModelOpt's quant_algo 'W4A8_AWQ'", "NVFP4"),
)


@pytest.mark.parametrize(("config", "problem", "fix"), REFUSED)
def test_what_is_not_read_is_named_with_what_is(config: dict[str, Any], problem: str, fix: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=config))
    with pytest.raises(CheckpointError, match=problem) as caught:
        source_of(tmp_path)
    assert fix in str(caught.value.fix) and caught.value.at == str(tmp_path / "config.json")


def test_codes_that_are_described_and_not_there_are_named(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=_FP8))
    with pytest.raises(CheckpointError, match=r"declares fp8 weights, but no tensor ends in \.weight_scale_inv"):
        source_of(tmp_path)
