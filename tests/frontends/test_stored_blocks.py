"""compressed-tensors' blocks that share a scale, also where a side is no multiple of the block's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.quantized import QuantizedSource
from llmc.graph.code_numbers import weight_values

_NAME = "model.layers.0.mlp.up_proj"
_FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}


def _write(directory: Path, weights: dict[str, Any], tensors: dict[str, Tensor], format: str) -> QuantizedSource:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"{_NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}, directory / "model.safetensors")
    return QuantizedSource(directory)


def _tensors(rows: int, columns: int, block: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    scales = (-(-rows // block[0]), -(-columns // block[1]))
    return {
        "weight": torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn),
        "weight_scale": torch.rand(scales, generator=generator) + 0.5,
    }


def _dequantized(tensors: dict[str, Tensor], block: tuple[int, int]) -> Tensor:
    """Block by block."""
    values, scales = tensors["weight"].float(), tensors["weight_scale"]
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            values[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scales[i, j]
    return values


@pytest.mark.parametrize("structure", [[128, 128], "128x128", [64, 32]])
@pytest.mark.parametrize("shape", [(256, 256), (192, 256), (576, 256), (256, 192), (96, 64), (200, 136)])
def test_reads_blocks_of_every_shape(shape: tuple[int, int], structure: Any, tmp_path: Path) -> None:
    block = (64, 32) if structure == [64, 32] else (128, 128)
    tensors = _tensors(*shape, block)
    source = _write(tmp_path, _FP8 | {"block_structure": structure}, tensors, "float-quantized")
    expected = _dequantized(tensors, block)
    assert torch.equal(source.load(f"{_NAME}.weight"), expected)
    parts = [source.load(f"{_NAME}.weight::{part}") for part in ("codes", "scales")]
    assert torch.equal(weight_values(parts[0], parts[1], None, "fp8"), expected)


def test_reads_zeros_of_blocks(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.arange(-96, 96, dtype=torch.int8).repeat(6, 1),
        "weight_scale": torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
        "weight_zero_point": torch.tensor([[1, 2], [3, -4]], dtype=torch.int8),
    }
    weights = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [4, 128], "symmetric": False}
    source = _write(tmp_path, weights, tensors, "int-quantized")
    weight = source.load(f"{_NAME}.weight")
    for row, column, value in ((0, 0, -97.0), (3, 128, 2.0 * (32 - 2)), (4, 127, 4.0 * (31 - 3)), (5, 191, 8.0 * 99)):
        assert float(weight[row, column]) == value


def test_reads_a_last_group_that_is_cut_off(tmp_path: Path) -> None:
    tensors = _tensors(4, 96, (1, 64))
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64, "symmetric": True}
    source = _write(tmp_path, weights, tensors, "float-quantized")
    assert torch.equal(source.load(f"{_NAME}.weight"), _dequantized(tensors, (1, 64)))


@pytest.mark.parametrize("scales", [(2, 2), (3, 3), (2,), (192, 2)])
def test_refuses_scales_of_another_shape(scales: tuple[int, ...], tmp_path: Path) -> None:
    tensors = _tensors(192, 384, (128, 128)) | {"weight_scale": torch.ones(scales)}
    with pytest.raises(
        CheckpointError, match=r"blocks of \[128, 128\] of a weight \[192, 384\] make it \[2, 3\]"
    ) as caught:
        _write(tmp_path, _FP8, tensors, "float-quantized")
    assert f"{_NAME}.weight' do not fit together: weight_scale has shape {list(scales)}" in caught.value.problem


@pytest.mark.parametrize("structure", [None, [128], "128", "axb", [0, 128], 128])
def test_refuses_a_block_structure_that_is_none(structure: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"block_structure .* is not read") as caught:
        _write(tmp_path, _FP8 | {"block_structure": structure}, _tensors(128, 128, (128, 128)), "float-quantized")
    assert "[128, 128]" in str(caught.value.fix)
