"""The block pool's accounts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.block_pool import BlockPool


@given(st.lists(st.tuples(st.sampled_from(("allocate", "share", "release")), st.integers(0, 9)), max_size=60))
def test_free_and_held_blocks_are_all_blocks(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for action, number in steps:
        if action == "allocate" and number <= pool.free:
            held.append(pool.allocate(number))
        elif action == "share" and held:
            blocks = held[number % len(held)]
            pool.share(blocks)
            held.append(list(blocks))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        counts = [sum(block in blocks for blocks in held) for block in range(pool.count)]
        assert counts == [pool.holders(block) for block in range(pool.count)]
        assert pool.free == counts.count(0)
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.allocate(8)) == list(range(8))


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="block 1 is free and cannot be shared"):
        pool.share([1])
