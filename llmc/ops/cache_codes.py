"""Quantized KV caches: how keys and values of one block and head lie in its bytes.

A cache is uint8 [blocks, kv_heads, block_size, bytes per position]; the bytes of one block and head are, in order,
the codes [block_size, code bytes], the scales [groups, block_size] and, of int4, the minima [groups, block_size], both
bf16. A group is a run of channels with a scale of its own at each position.

    format    codes of one position                                       value
    int8      one byte per channel, -127 … 127                              code · scale
    fp8       one byte per channel, bits of e4m3fn                          e4m3(code) · scale
    int4      byte j: channel j in the low half, j + channels/2 in the high one      minimum + code · scale

The ops take a CacheFormat as text (llmc/formats/cache_format.py). In fp32 and from the scale as it was rounded to
bf16: code = nearest((x - minimum) / scale), ties to even, saturated; scale = max |x| / 127 or / 448, or
(max - min) / 15; where that is 0 or less, the scale is 1. A NaN, which codes cannot say, makes its group's scale one.
"""

import torch
from torch import Tensor

from llmc.formats.cache_format import CacheFormat, parse_cache_format
from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.code_numbers import code_dtype, code_numbers
from llmc.ops.weight_codes import nearest_codes


def write_codes(values: Tensor, cache: Tensor, slot_mapping: Tensor, cache_format: str) -> None:
    """Quantize values: [tokens, kv_heads, channels] into their slots of a cache, in place."""
    format, channels = parse_cache_format(cache_format), values.shape[2]
    block_size = cache.shape[2]
    slots = slot_mapping.long()
    blocks, positions = slots // block_size, slots % block_size
    codes, scales, minima = _quantize(values.float(), format)
    code_view, scale_view, minimum_view = _parts(cache, channels, format)
    code_view[blocks, :, positions] = codes
    scale_view[blocks, :, :, positions] = scales
    if minima is not None and minimum_view is not None:
        minimum_view[blocks, :, :, positions] = minima


def read_codes(blocks: Tensor, channels: int, cache_format: str) -> Tensor:
    """The values of some blocks of a cache, fp32. blocks: [n, kv_heads, block_size, bytes]; returns [.., channels]."""
    format = parse_cache_format(cache_format)
    codes, scales, minima = _parts(blocks.contiguous(), channels, format)
    if format.has_minima:
        values = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    else:
        values = code_numbers(codes.view(code_dtype(format.codes)), format.codes)
    width = channels // format.groups(channels)
    values = values * scales.float().transpose(2, 3).repeat_interleave(width, dim=-1)
    return values if minima is None else values + minima.float().transpose(2, 3).repeat_interleave(width, dim=-1)


def _quantize(values: Tensor, format: CacheFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Code bytes [tokens, heads, bytes], and scales and minima [tokens, heads, groups], bf16."""
    tokens, heads, channels = values.shape
    grouped = values.reshape(tokens, heads, format.groups(channels), -1)
    if format.has_minima:
        low, high = grouped.amin(-1).bfloat16(), grouped.amax(-1)
        scales = _positive(((high - low.float()) / 15).bfloat16())
        codes = torch.round((grouped - low.float()[..., None]) / scales.float()[..., None]).clamp(0, 15)
        first, second = codes.to(torch.uint8).reshape(tokens, heads, channels).chunk(2, dim=-1)
        return first | (second << 4), scales, low
    scales = _positive((grouped.abs().amax(-1) / CODE_FORMATS[format.codes].largest).bfloat16())
    scaled = (grouped / scales.float()[..., None]).reshape(tokens, heads, channels)
    return nearest_codes(scaled, None, format.codes).view(torch.uint8), scales, None


def _positive(scales: Tensor) -> Tensor:
    return torch.where(scales <= 0, torch.ones_like(scales), scales)


def _parts(cache: Tensor, channels: int, format: CacheFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of a contiguous cache: codes [n, heads, block_size, bytes], scales and minima [n, heads, groups, …]."""
    count, heads, block_size, _ = cache.shape
    flat = cache.view(count, heads, -1)
    groups, code_end = format.groups(channels), block_size * format.code_bytes(channels)
    codes = flat[..., :code_end].unflatten(-1, (block_size, -1))
    length = groups * block_size * 2
    sections = [
        flat[..., start : start + length].view(torch.bfloat16).unflatten(-1, (groups, block_size))
        for start in range(code_end, flat.shape[-1], length)
    ]
    return codes, sections[0], sections[1] if len(sections) > 1 else None
