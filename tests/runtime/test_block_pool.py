"""The block pool's accounts: holders, free blocks, and the content that it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.block_pool import BlockPool

ACTIONS = st.sampled_from(("allocate", "share", "release", "register"))


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=80))
def test_every_block_is_used_cached_or_free(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for action, number in steps:
        if action == "allocate" and number <= pool.available:
            held.append(pool.allocate(number))
        elif action == "share" and held:
            blocks = held[number % len(held)]
            pool.share(blocks)
            held.append(list(blocks))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "register" and held and held[-1]:
            pool.register(held[-1][0], bytes([number]))
        counts = [sum(block in blocks for blocks in held) for block in range(pool.count)]
        assert counts == [pool.holders(block) for block in range(pool.count)]
        assert pool.used + pool.cached + pool.free == pool.count
        assert pool.available == counts.count(0)
        found = [block for digest in range(10) if (block := pool.find(bytes([digest]))) is not None]
        assert len(found) == len(set(found)), "a block has one content"
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.allocate(8)) == list(range(8))
    assert all(pool.find(bytes([digest])) is None for digest in range(10)), "given away blocks are not found"


def test_content_is_kept_until_the_block_is_needed_and_the_oldest_goes_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    for block, digest in zip((*first, *second), (b"a", b"b", b"c"), strict=True):
        pool.register(block, digest)
    pool.release(first)
    pool.release(second)
    assert (pool.used, pool.cached, pool.free) == (0, 3, 1)
    pool.allocate(2)
    assert pool.find(b"b") is None, "released first: the end of the list goes before its beginning"
    assert pool.find(b"a") == first[0] and pool.find(b"c") == second[0]
    pool.share([first[0]])
    assert (pool.used, pool.cached, pool.free) == (3, 1, 0)


def test_two_blocks_of_one_content_are_known_by_the_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.register(second, b"x")
    pool.release([second])
    assert pool.find(b"x") == first and pool.free == 1
    pool.release([first])
    assert (pool.cached, pool.free) == (1, 1)


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="all 2 blocks are held"):
        pool.allocate(3)
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="block 1 is free and cannot be shared"):
        pool.share([1])
    with pytest.raises(ValueError, match="block 1 is free and has no content"):
        pool.register(1, b"x")
