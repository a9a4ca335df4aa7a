"""Ways to store keys and values in fewer bits, as functions from numbers to the numbers that are read back.

Those that llmc has round as its ops do (llmc/ops/cache_codes.py); the others are candidates. A rounding takes one
layer's keys or values, fp32 [heads, tokens, channels], after their rotation by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.formats.cache_format import parse_cache_format
from llmc.ops.cache_codes import read_codes, write_codes
from llmc.ops.rotate_heads import rotated

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """The numbers as they are."""
    return x


def of_llmc(spelled: str) -> Rounding:
    """The rounding of one of llmc's formats, by the ops that engines are tested against."""
    format = parse_cache_format(spelled)

    def rounding(x: Tensor) -> Tensor:
        heads, tokens, channels = x.shape
        cache = torch.zeros(1, heads, tokens, format.position_bytes(channels), dtype=torch.uint8)
        write_codes(x.transpose(0, 1), cache, torch.arange(tokens), format.stored)
        return read_codes(cache, channels, format.stored)[0]

    return _rotating(rounding) if format.rotated else rounding


def ranged(bits: int, group: int | None = None, search: bool = False) -> Rounding:
    """Rotated heads as codes of a scale and a minimum in bf16, per group of channels and token.

    Args:
        bits: of a code.
        group: channels that share a scale; None: all of a head's.
        search: whether each group takes, of 25 ranges between its extremes, the one with the least squared error.
    """
    shares = (1.0, 0.95, 0.9, 0.85, 0.8) if search else (1.0,)

    def rounding(x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, group or x.shape[-1]))
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        middle = (low + high) / 2
        best, least = grouped, torch.full_like(low, torch.inf)
        for below in shares:
            for above in shares:
                minimum = _bf16(middle + (low - middle) * below)
                found = _codes(grouped, minimum, middle + (high - middle) * above, bits)
                error = (found - grouped).square().sum(-1, keepdim=True)
                best, least = torch.where(error < least, found, best), torch.minimum(error, least)
        values: Tensor = best.flatten(-2)
        return values

    return _rotating(rounding)


TILE = 128
_ROUNDS = 16


def variance_normalized(bits: int, by_channel: bool) -> Rounding:
    """KVarN: rotated tiles of 128 tokens, divided by scales of channels and tokens that even out their deviations.

    Args:
        bits: of a code.
        by_channel: whether a tile's scales and minima are per channel, as KVarN has of keys, or per token.
    """
    tokens_axis, channels_axis = -2, -1

    def rounding(x: Tensor) -> Tensor:
        whole = x.shape[1] // TILE * TILE
        tiles = x[:, :whole].unflatten(1, (-1, TILE))
        scales = _even_scales(tiles)
        normal, axis = tiles / scales, tokens_axis if by_channel else channels_axis
        found = _codes(normal, normal.amin(axis, keepdim=True), normal.amax(axis, keepdim=True), bits)
        return torch.cat(((found * scales).flatten(1, 2), x[:, whole:]), dim=1)

    return _rotating(rounding)


def _even_scales(tiles: Tensor) -> Tensor:
    """Of the rounds' scales, the product of a token's and a channel's with which deviations differ least."""
    tokens, channels = torch.zeros_like(tiles[..., :1]), torch.zeros_like(tiles[..., :1, :])
    best, least = torch.ones_like(tiles), torch.full_like(tiles[..., :1, :1], torch.inf)
    for _ in range(_ROUNDS):
        scales = torch.exp(tokens + channels)
        of_channels, of_tokens = (_deviation(tiles / scales, axis) for axis in (-2, -1))
        spread = of_channels.amax(-1, keepdim=True) / of_channels.amin(-1, keepdim=True)
        spread = spread + of_tokens.amax(-2, keepdim=True) / of_tokens.amin(-2, keepdim=True)
        best, least = torch.where(spread < least, scales, best), torch.minimum(spread, least)
        channels = (channels + of_channels.log()).clamp(-0.3, 10)
        tokens = (tokens + _deviation(tiles / torch.exp(tokens + channels), -1).log()).clamp(-0.3, 10)
    return best


def _deviation(tiles: Tensor, axis: int) -> Tensor:
    return tiles.std(axis, keepdim=True).clamp_min(1e-9)


def _rotating(rounding: Rounding) -> Rounding:
    return lambda x: rotated(rounding(rotated(x)))


def _codes(x: Tensor, minimum: Tensor, maximum: Tensor, bits: int) -> Tensor:
    """The values of the nearest codes, counted from a minimum in steps of a scale in bf16."""
    most = 2**bits - 1
    scale = _bf16((maximum - minimum) / most)
    scale = torch.where(scale <= 0, 1.0, scale)
    return torch.round((x - minimum) / scale).clamp(0, most) * scale + minimum


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@dataclass(frozen=True)
class Candidate:
    """A form of a cache.

    Args:
        name: of the table's row; of llmc's formats, the option.
        keys, values: how they are rounded.
        key_bytes, value_bytes: per position of a head of 64 channels, without rows that stay exact.
        centered: whether a constant is subtracted from keys: their mean over a calibration text. A softmax does not
            change if each of its scores changes by the same number.
        first: leading rows that stay exact.
        recent: newest rows that stay exact, the query's own among them.
        tile: rows that become codes together, once all of them are there.
    """

    name: str
    keys: Rounding
    values: Rounding
    key_bytes: float
    value_bytes: float
    centered: bool = False
    first: int = 0
    recent: int = 0
    tile: int = 1


def _of_llmc(spelled: str) -> Candidate:
    size = parse_cache_format(spelled).position_bytes(64)
    return Candidate(spelled, of_llmc(spelled), of_llmc(spelled), size, size)


def _kvarn(keys: int, values: int) -> Candidate:
    """A tile of 64 channels also has 3 · 64 numbers of its channels in bf16, or 64 and 3 per token."""
    rounding = (variance_normalized(keys, by_channel=True), variance_normalized(values, by_channel=False))
    sizes = (8 * keys + 2 + 3 * 64 * 2 / TILE, 8 * values + 3 * 2 + 64 * 2 / TILE)
    return Candidate(f"KVarN, keys {keys} bits, values {values}", *rounding, *sizes, first=4, tile=TILE)


def _candidates() -> tuple[Candidate, ...]:
    int4, int8 = of_llmc("int4:rotated"), of_llmc("int8:rotated")
    searched, three = ranged(4, 32, search=True), ranged(3, 32)
    six, five = ranged(6), ranged(5)
    return (
        *map(_of_llmc, ("int8", "int8:rotated", "int4:rotated")),
        Candidate("int4:rotated, ranges searched", searched, searched, 40, 40),
        Candidate("int4:rotated, keys centered", int4, int4, 40, 40, centered=True),
        Candidate("int4:rotated, keys centered, first 4 rows exact", int4, int4, 40, 40, centered=True, first=4),
        Candidate("keys int8:rotated, values int4:rotated", int8, int4, 66, 40),
        Candidate("6 bits per head, rotated", six, six, 52, 52),
        Candidate("5 bits per head, rotated", five, five, 44, 44),
        _kvarn(4, 4),
        _kvarn(3, 3),
        Candidate("int4:rotated, newest 64 rows exact", int4, int4, 40, 40, recent=64),
        Candidate("int4:rotated, newest 128 rows exact", int4, int4, 40, 40, recent=128),
        _of_llmc("int8:g32"),
        _kvarn(4, 2),
        Candidate("3 bits per 32 channels, rotated", three, three, 32, 32),
        _kvarn(2, 2),
        *map(_of_llmc, ("int8:g32:rotated", "int4", "int4:head:rotated", "fp8")),
    )


CANDIDATES: Mapping[str, Candidate] = {each.name: each for each in _candidates()}
