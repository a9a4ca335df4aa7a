"""Arguments of paged attention over a cache of codes, on the device meta: shapes without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmc.formats.cache_format import parse_cache_format


def coded_attention(
    format: str, heads: int, kv_heads: int, dim: int, window: int | None = None, softcap: float | None = None
) -> tuple[Any, ...]:
    """Of two requests with eight tokens, in bf16."""
    q, cache = torch.empty(8, heads, dim, dtype=torch.bfloat16, device="meta"), coded_cache(format, kv_heads, dim)
    starts, lens, tables = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((3,), (2,), (2, 8192)))
    return (q, cache, cache, starts, lens, tables, dim**-0.5, window, softcap, None, format, dim)


def newest_apart(arguments: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """The same with trees, over caches that policies may cut, and with newest rows in other caches."""
    q, codes, *_ = arguments
    cache = torch.empty(64, codes.shape[1], 16, q.shape[2], dtype=q.dtype, device="meta")
    tables, lens = (torch.empty(2, *shape, dtype=torch.int32, device="meta") for shape in ((8192,), ()))
    trees = torch.empty(8, dtype=torch.int64, device="meta")
    return (*arguments, trees, None, None, False, None, None, None, cache, cache, tables, rows, lens)


def coded_cache(format: str, kv_heads: int, dim: int) -> Tensor:
    """Of 64 blocks of 16 positions."""
    width = parse_cache_format(format).position_bytes(dim)
    return torch.empty(64, kv_heads, 16, width, dtype=torch.uint8, device="meta")
