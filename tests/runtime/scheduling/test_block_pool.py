"""The block pool's accounts: holders, free blocks, and the content that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.scheduling.block_pool import BlockPool

ACTIONS = st.sampled_from(("allocate", "share", "release", "keep", "forget"))


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=80))
def test_every_block_is_used_cached_or_free(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    contents: dict[int, object] = {}

    def lose(blocks: Sequence[int], lost: Sequence[object]) -> None:
        assert [contents.pop(block) for block in blocks] == lost

    pool.tell_losses(lose)
    for action, number in steps:
        if action == "allocate" and number <= pool.available:
            held.append(pool.allocate(number))
            assert not any(block in contents for block in held[-1]), "a lost content is told"
        elif action == "share" and held:
            blocks = held[number % len(held)]
            pool.share(blocks)
            held.append(list(blocks))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "keep" and held and held[-1]:
            pool.keep(held[-1][:1], number)
            contents[held[-1][0]] = number
        elif action == "forget" and number < 8:
            pool.forget(number)
            contents.pop(number, None)
        counts = [sum(block in blocks for blocks in held) for block in range(pool.count)]
        assert counts == [pool.holders(block) for block in range(pool.count)]
        assert pool.used + pool.cached + pool.free == pool.count
        assert pool.available == counts.count(0)
        assert [pool.content(block) for block in range(8)] == [contents.get(block) for block in range(8)]
        assert pool.cached == sum(not counts[block] for block in contents)
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.allocate(8)) == list(range(8))
    assert not contents, "given away blocks keep nothing"


def test_content_is_kept_until_the_block_is_needed_and_the_oldest_goes_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    for block, content in zip((*first, *second), "abc", strict=True):
        pool.keep([block], content)
    pool.release(first)
    pool.release(second)
    assert (pool.used, pool.cached, pool.free) == (0, 3, 1)
    pool.allocate(2)
    assert pool.content(first[1]) is None, "released first: the end of the list goes before its beginning"
    assert (pool.content(first[0]), pool.content(second[0])) == ("a", "c")
    pool.share([first[0]])
    assert (pool.used, pool.cached, pool.free) == (3, 1, 0)


def test_a_forgotten_block_is_free_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.keep([first, second], "x")
    pool.release([second])
    pool.forget(second)
    pool.forget(first)
    assert (pool.used, pool.cached, pool.free) == (1, 0, 1)
    pool.release([first])
    assert (pool.cached, pool.free) == (0, 2)


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks were requested, and 2 of 2 are not held"):
        pool.allocate(3)
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="block 1 is free and cannot be shared"):
        pool.share([1])
    with pytest.raises(ValueError, match="block 1 is not held and gets no content"):
        pool.keep([1], "x")
