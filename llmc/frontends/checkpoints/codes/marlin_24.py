"""Codes as the Marlin kernel for 2:4 sparsity wants them, put back into rows.

weight_packed int32 [in / 32, out · bits / 2]: of each 4 columns the two that are kept, shuffled within tiles for
tensor cores; scale_packed [groups, out], shuffled likewise; meta int16: two bits for each kept column, where it was
among its 4, in the order of CUTLASS. Source: compressed-tensors 0.9 (marlin_24, permutations_24).
"""

import torch
from torch import Tensor

_TILE = 16
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


def marlin_24_shape(packed: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Rows and columns of the weight whose weight_packed has this shape."""
    return packed[1] * (32 // bits) // _TILE, packed[0] * 2 * _TILE


def unpack_marlin_24(packed: Tensor, scales: Tensor, meta: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [out, in], zeros where none is kept, scales [out, groups]. Raises ValueError if they do not fit."""
    out, columns = marlin_24_shape(tuple(packed.shape), bits)
    if out % 64 or columns % 32 or scales.dim() != 2 or scales.shape[1] != out:
        raise ValueError(f"weight_packed is {list(packed.shape)}, scale_packed {list(scales.shape)}")
    if meta.dtype is not torch.int16 or meta.numel() * 16 != out * columns:
        raise ValueError(f"meta is {meta.dtype} {list(meta.shape)} for a weight {[out, columns]}")
    kept = _kept_codes(packed, out, columns // 2, bits)
    places = _places(meta, out, columns)
    if bool((places[..., 0] >= places[..., 1]).any()):
        raise ValueError("meta names columns that are not in order")
    codes = torch.zeros(out, columns // 4, 4, dtype=torch.int8)
    codes.scatter_(2, places, kept.view(out, columns // 4, 2))
    return codes.view(out, columns), _scales(scales)


def _kept_codes(packed: Tensor, out: int, kept: int, bits: int) -> Tensor:
    """[out, kept], int8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
    order = _tile_order(bits)
    tiles = torch.empty_like(codes).view(-1, len(order))
    tiles[:, order] = codes.view(-1, len(order))
    by_tile = tiles.view(kept // _TILE, out // _TILE, _TILE, _TILE).permute(0, 2, 1, 3)
    return (by_tile.reshape(kept, out).t() - (1 << (bits - 1))).to(torch.int8).contiguous()


def _tile_order(bits: int) -> Tensor:
    """Return the order in which the elements of four tiles of 16 × 16 are stored."""
    order: list[int] = []
    for thread in range(32):
        column = thread // 4
        rows = [2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1]
        first = [16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block for block in (0, 1) for row in rows]
        order += [place + step for step in range(4) for place in first]
    mixed = _INTERLEAVED[bits]
    return torch.tensor(order).view(-1, len(mixed))[:, mixed].flatten()


def _places(meta: Tensor, out: int, columns: int) -> Tensor:
    """[out, columns / 4, 2]: which two of each four columns are kept, int64."""
    words = columns // 16
    row, column = torch.arange(out)[:, None].expand(out, words), torch.arange(words).expand(out, words)
    row = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
    right = ((row % 2 == 0) & (column % 2 == 1)).long() - ((row % 2 == 1) & (column % 2 == 0)).long()
    row, column = row + right, column - right
    offsets = column // 2 * out * 2 + row * 2 + column % 2
    in_order = meta.flatten()[offsets.flatten()].view(out, words, 1).int()
    return (in_order >> torch.arange(0, 16, 2) & 3).view(out, columns // 4, 2).long()


def _scales(scales: Tensor) -> Tensor:
    """[out, groups]; a single scale per row is already in place."""
    if scales.shape[0] == 1:
        return scales.t().contiguous()
    mixed = torch.tensor([8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)])
    ordered = torch.empty_like(scales).view(-1, 64)
    ordered[:, mixed] = scales.reshape(-1, 64)
    return ordered.view(scales.shape).t().contiguous()
