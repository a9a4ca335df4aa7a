"""Single rows of a KV cache by slot, whatever it holds: what a tree's accepted path needs to be moved into place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.formats.cache_format import parse_cache_formats
from llmc.program.program import ITEMSIZES, CacheSlot, Program

if TYPE_CHECKING:
    from torch import Tensor

# An array of NumPy or a tensor of torch, uint8.
Bytes = TypeVar("Bytes", npt.NDArray[np.uint8], "Tensor")


def slot_views(program: Program, memories: Iterable[Bytes], group: int = 0) -> list[Bytes]:
    """Views of a group's caches with an axis of slots. The memory is given as bytes in the order of Program.caches_of.

    [blocks, heads, runs, block_size, bytes] each. A cache of numbers is one view; one of codes is two, the second one
    of scales with their minima (ops/cache_codes.py).
    """
    named = zip(program.caches_of(group).items(), memories, strict=True)
    size = program.limits.block_size
    return [view for (name, cache), memory in named for view in cache_views(cache, name[-1], memory, size)]


def move_slots(views: Sequence[Bytes], sources: Any, destinations: Any) -> None:
    """Copy what is in the slots `sources`, [n], to `destinations`, in each view; all of it is read first."""
    if not views:
        return
    block_size = views[0].shape[3]
    there, to = destinations // block_size, destinations % block_size
    here, at = sources // block_size, sources % block_size
    for view in views:
        view[there, :, :, to] = view[here, :, :, at]


def cache_views(cache: CacheSlot, part: str, memory: Bytes, block_size: int) -> list[Bytes]:
    """Return the views of one cache whose memory is bytes, as `slot_views` does. part: k or v."""
    width = cache.widths()["kv".index(part)] * ITEMSIZES[cache.dtype]
    of_heads = memory.reshape(-1, cache.kv_heads, block_size * width)
    if cache.format is None:
        return [of_heads.reshape(-1, cache.kv_heads, 1, block_size, width)]
    codes = parse_cache_formats(cache.format).of(part).code_bytes((cache.head_dim, cache.value_dim)["kv".index(part)])
    scales = (width - codes) // 2
    return [
        of_heads[:, :, : block_size * codes].reshape(-1, cache.kv_heads, 1, block_size, codes),
        of_heads[:, :, block_size * codes :].reshape(-1, cache.kv_heads, scales, block_size, 2),
    ]
