"""Sparse checkpoints in the formats of compressed-tensors, written by code that shares nothing with the reader.

After the loops of compressed-tensors 0.9: bits are packed by numpy, marlin-24 is written tile by tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.quantized_checkpoints import Writer


def half_zeros(module: str, weight: Tensor, *, of_four: bool) -> Tensor:
    """The weight with half of its elements zero: two of each four columns, or any."""
    generator = torch.Generator().manual_seed(sum(map(ord, module)))
    if not of_four:
        return torch.where(torch.rand(weight.shape, generator=generator) < 0.5, weight, 0.0)
    runs = weight.reshape(len(weight), -1, 4)
    kept = torch.rand(runs.shape, generator=generator).topk(2, -1).indices
    return torch.zeros_like(runs).scatter_(2, kept, runs.gather(2, kept)).reshape(weight.shape)


def sparsity_config(format: str, structure: str = "unstructured") -> dict[str, Any]:
    """Of config.json, beside quant_method."""
    sparsity = {"format": format, "sparsity_structure": structure, "global_sparsity": 0.5, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "sparsity_config": sparsity, "ignore": ["lm_head"]}


def bitmask_writer(*, of_four: bool, by_weight: bool = False) -> Writer:
    """of_four: sparse-24-bitmask. by_weight: names go on from the weight's, as older files have them."""

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        dense = half_zeros(module, weight, of_four=of_four)
        kept = dense.numpy() != 0
        counts = kept.sum(1)
        parts = {
            "shape": torch.tensor(dense.shape).reshape(-1, 1) if of_four else torch.tensor(dense.shape),
            "compressed": torch.from_numpy(dense.numpy()[kept]),
            "bitmask": torch.from_numpy(np.packbits(kept, axis=1, bitorder="little")),
        }
        if of_four:
            parts["compressed"] = parts["compressed"].reshape(len(dense), -1)
        else:
            parts["row_offsets"] = torch.from_numpy(np.concatenate(([0], counts.cumsum()[:-1])))
        prefix = "weight." if by_weight else ""
        return {prefix + name: part for name, part in parts.items()}, dense

    return write


def dense_writer(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A plain weight full of zeros."""
    dense = half_zeros(module, weight, of_four=False)
    return {"weight": dense}, dense


def marlin_24_writer(bits: int, group: int | None) -> Writer:
    """group: columns that share a scale; None for all of a row."""

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        limit = 1 << (bits - 1)
        grouped = half_zeros(module, weight, of_four=True).reshape(rows, -1, group or columns)
        scales = (grouped.abs().amax(-1) / (limit - 1)).half()
        codes = (grouped / scales.float()[..., None]).round().clamp(-limit, limit - 1).reshape(rows, columns)
        values = codes.reshape(rows, -1, scales.numel() and columns // scales.shape[1]) * scales.float()[..., None]
        kept, meta = _semi_structured(codes.int().numpy())
        parts = {
            "weight_packed": torch.from_numpy(_marlin_tiles(kept.T + limit, bits)),
            "scale_packed": torch.from_numpy(_marlin_scales(scales.numpy().T)),
            "meta": torch.from_numpy(meta),
        }
        return parts, values.reshape(rows, columns)

    return write


def _semi_structured(codes: Any) -> tuple[Any, Any]:
    """The two kept columns of each four, and where they were, in CUTLASS's order of words."""
    rows, columns = codes.shape
    kept = np.zeros((rows, columns // 2), np.int32)
    meta = np.zeros(rows * columns // 16, np.uint16)
    for row in range(rows):
        for run in range(columns // 4):
            there = [i for i in range(4) if codes[row, 4 * run + i] != 0]
            # A place must be named, be there an element or not.
            places = sorted((there + [i for i in range(4) if i not in there])[:2])
            kept[row, 2 * run : 2 * run + 2] = [codes[row, 4 * run + i] for i in places]
            bits = (places[0] | places[1] << 2) << (4 * (run % 4))
            meta[_cutlass_place(row, run // 4, rows)] |= bits
    return kept, meta.astype(np.int16).reshape(columns // 32, rows * 2)


def _cutlass_place(row: int, word: int, rows: int) -> int:
    """reorder_meta of CUTLASS's host_reorder.h, then columns by twos."""
    to = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + (row % 32) % 4 // 2 * 32 + row % 64 // 8 * 4
    if to % 2 == 0 and word % 2 == 1:
        to, word = to + 1, word - 1
    elif to % 2 == 1 and word % 2 == 0:
        to, word = to - 1, word + 1
    return word // 2 * rows * 2 + to * 2 + word % 2


def _marlin_tiles(codes: Any, bits: int) -> Any:
    """codes: [in / 2, out], unsigned."""
    size_k, size_n = codes.shape
    tiles = codes.reshape(size_k // 16, 16, size_n // 16, 16).transpose(0, 2, 1, 3).reshape(size_k // 16, -1)
    order = []
    for i in range(32):
        column = i // 4
        first = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                first.append(16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block)
        order += [place + j for j in range(4) for place in first]
    interleave = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    mixed = np.array(order).reshape(-1, len(interleave))[:, interleave].ravel()
    shuffled = tiles.reshape(-1, len(mixed))[:, mixed].reshape(tiles.shape).astype(np.uint32)
    count = 32 // bits
    packed = np.zeros((shuffled.shape[0], shuffled.shape[1] // count), np.uint32)
    for i in range(count):
        packed |= shuffled[:, i::count] << np.uint32(bits * i)
    return packed.astype(np.int32)


def _marlin_scales(scales: Any) -> Any:
    """scales: [groups, out]."""
    if len(scales) == 1:
        return np.ascontiguousarray(scales)
    mixed = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
    return np.ascontiguousarray(scales.reshape(-1, 64)[:, mixed].reshape(scales.shape))
