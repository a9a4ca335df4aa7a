"""Checkpoints without their zeros are read as what they stand for, and what contradicts itself is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.open_model import open_model
from llmc.graph.execute import run_tokens
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.passes.quantization.quantizing import TOKENS
from tests.quantized_checkpoints import Writer, write_quantized
from tests.quick_sample import quick_sample
from tests.sparse_checkpoints import bitmask_writer, dense_writer, marlin_24_writer, sparsity_config
from tests.tiny_models import tiny_model

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "sparse-bitmask": (sparsity_config("sparse-bitmask"), bitmask_writer(of_four=False)),
    "sparse-bitmask, older": (sparsity_config("sparse-bitmask"), bitmask_writer(of_four=False, by_weight=True)),
    "sparse-24-bitmask": (sparsity_config("sparse-24-bitmask", "2:4"), bitmask_writer(of_four=True)),
    "dense": (sparsity_config("dense"), dense_writer),
    "no word of it": ({}, dense_writer),
}


def written(directory: Path, config: dict[str, Any], writer: Writer, inner: int = 124) -> tuple[Any, dict[str, Tensor]]:
    """A tiny Llama in that format, and its weights, which the model then has too. inner: columns of down_proj, whose
    last byte of a mask is half empty unless told otherwise."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=inner, num_key_value_heads=4)
    dense = write_quantized(directory, model, config, writer)
    with torch.no_grad():
        for name, tensor in dense.items():
            model.get_parameter(name).copy_(tensor)
    return model, dense


def optimized(directory: Path, **options: Any) -> tuple[Captured, PipelineResult]:
    parsed = parse_options({"dtype": "float32", **options})
    captured = capture(directory, parsed)
    return captured, run_pipeline(captured.graph, default(), parsed, data=ModelData(captured.source))


@pytest.mark.parametrize("name", quick_sample(FORMATS, ("dense", "sparse-bitmask", "sparse-24-bitmask")))
def test_weights_and_logits_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    model, dense = written(tmp_path, *FORMATS[name])
    captured, result = optimized(tmp_path)
    assert all(torch.equal(captured.source.load(tensor_name), tensor) for tensor_name, tensor in dense.items())
    assert {weight.tensor for weight in result.graph.sparse} == set(dense)
    assert all(0.4 < weight.zeros < 0.6 and weight.bits is not None for weight in result.graph.sparse)
    got = run_tokens(result.graph, captured.source, TOKENS)
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "group"), quick_sample([(4, None), (4, 64), (8, None)], [(4, 64)]))
def test_reads_marlin_24(bits: int, group: int | None, tmp_path: Path) -> None:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "marlin-24"}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    _, dense = written(tmp_path, config, marlin_24_writer(bits, group), inner=128)
    captured, result = optimized(tmp_path)
    for name, tensor in dense.items():
        torch.testing.assert_close(captured.source.load(name), tensor, rtol=0, atol=0)
    assert {weight.module for weight in result.graph.quantized} == {name.removesuffix(".weight") for name in dense}


def spoil(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _lie(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.bitmask"][0, 0] ^= 1


def _truncate(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.bitmask"] = tensors[f"{UP}.bitmask"][:, :-1].contiguous()


def _shorten(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.compressed"] = tensors[f"{UP}.compressed"][:-1].contiguous()


def _shift(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.row_offsets"][1] += 1


def _overhang(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.bitmask"][0, -1] |= 128


def _forget(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP}.bitmask"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_lie, "bits for"),
        (_truncate, "the bitmask is torch.uint8 .*, expected uint8"),
        (_shorten, "bits for"),
        (_shift, "row_offsets are not where the rows' bits begin"),
        (_overhang, "the bitmask has bits after the last of 124 columns"),
    ],
)
def test_masks_that_lie_are_named(change: Callable[[dict[str, Tensor]], None], problem: str, tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["sparse-bitmask"])
    spoil(tmp_path, change)
    with pytest.raises(
        CheckpointError, match=rf"the masks of '({UP}|{DOWN}).weight' do not fit: .*{problem}"
    ) as raised:
        optimized(tmp_path)
    assert raised.value.fix


def test_a_mask_of_more_than_two_in_four_is_named(tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["sparse-24-bitmask"])

    def move(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.bitmask"][0] = torch.tensor(15, dtype=torch.uint8)

    spoil(tmp_path, move)
    with pytest.raises(CheckpointError, match="not 2 of each 4 columns have a bit"):
        optimized(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({f"{UP}.compressed": lambda part: part.int()}, f"'{UP}.compressed' is stored as I32: codes behind masks"),
        (
            {f"{UP}.compressed": lambda part: part.to(torch.float8_e4m3fn)},
            f"'{UP}.compressed' is stored as F8_E4M3: codes behind masks",
        ),
        (
            {f"{UP}.compressed": lambda part: part[:0], f"{UP}.bitmask": torch.zeros_like},
            f"{UP}.weight' .* holds nothing but zeros: {UP}.compressed is empty",
        ),
        (
            {f"{UP}.shape": lambda part: part / 0 * 0},
            rf"{UP}.shape holds torch.float32 \[2\], not the sizes of a matrix",
        ),
    ],
)
def test_parts_of_another_type_are_named(
    change: dict[str, Callable[[Tensor], Tensor]], problem: str, tmp_path: Path
) -> None:
    written(tmp_path, *FORMATS["sparse-bitmask"])
    spoil(tmp_path, lambda tensors: tensors.update({name: to(tensors[name]) for name, to in change.items()}))
    with pytest.raises(CheckpointError, match=problem) as raised:
        optimized(tmp_path)
    assert raised.value.fix


def _settings(directory: Path, **changed: object) -> None:
    """Of config.json; None takes a name out."""
    config = directory / "config.json"
    settings = json.loads(config.read_text()) | changed
    config.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_both_names_of_the_settings_are_read(name: str, tmp_path: Path) -> None:
    """Masks alone, masks and codes at once, and what is no setting."""
    config, writer = FORMATS["sparse-bitmask"]
    _, dense = written(tmp_path, config, writer)
    _settings(tmp_path, quantization_config=None)
    _settings(tmp_path, **{name: config})
    source = open_model(tmp_path).weights
    assert all(torch.equal(source.load(tensor_name), tensor) for tensor_name, tensor in dense.items())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    for changed, problem in (
        (config | {"config_groups": {"group_0": group}}, "both sparse-bitmask and quantized"),
        (config | {"sparsity_config": "sparse-bitmask"}, "sparsity_config is 'sparse-bitmask', not an object"),
        ("sparse-bitmask", f"{name} is 'sparse-bitmask', not an object"),
    ):
        _settings(tmp_path, **{name: changed})
        with pytest.raises(CheckpointError, match=problem) as raised:
            assert not open_model(tmp_path).weights
        assert raised.value.fix


def test_a_missing_part_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["sparse-bitmask"])
    spoil(tmp_path, _forget)
    with pytest.raises(CheckpointError, match=f"{UP}.weight has .* but no bitmask"):
        optimized(tmp_path)
    _settings(tmp_path, quantization_config=sparsity_config("csr"))
    with pytest.raises(CheckpointError, match=r"sparsity_config\.format is 'csr'") as raised:
        optimized(tmp_path)
    assert "sparse-24-bitmask" in str(raised.value.fix)
