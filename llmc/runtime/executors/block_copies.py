"""Whole blocks of a group of caches as bytes: what leaves a cache for the second tier, and comes back from it."""

from collections.abc import Sequence

import numpy as np

from llmc.runtime.memory import Bytes


def read_blocks(caches: Sequence[Bytes], blocks: Sequence[int]) -> Bytes:
    """Copies of blocks, [len(blocks), bytes]: what each cache holds of a block, one cache after the other.

    Args:
        caches: the group's caches, [blocks, bytes] each.
        blocks: their numbers.
    """
    places = list(blocks)
    copies = np.empty((len(places), sum(cache.shape[1] for cache in caches)), np.uint8)
    begin = 0
    for cache in caches:
        copies[:, begin : begin + cache.shape[1]] = cache[places]
        begin += cache.shape[1]
    return copies


def write_blocks(caches: Sequence[Bytes], blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
    """Write the bytes that `read_blocks` gave, a row for each block, which may be another than it was read from."""
    begin = 0
    for cache in caches:
        end = begin + cache.shape[1]
        for block, content in zip(blocks, contents, strict=True):
            cache[block] = content[begin:end]
        begin = end
