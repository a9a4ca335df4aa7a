"""The second tier: what goes in comes back bit by bit or not at all, whatever happens to the store meanwhile."""

from __future__ import annotations

import logging
import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.kv_tier.block_files import BlockFiles
from llmc.runtime.kv_tier.block_store import BlockKey, BlockStore
from llmc.runtime.kv_tier.host_blocks import HostBlocks
from llmc.runtime.kv_tier.tier import Tier
from llmc.runtime.memory import Bytes

SIZES = (4096, 512)
IDENTITY = sha256(b"an engine").digest()


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(group, sha256(b"%d" % number).digest())


def private(number: int) -> BlockKey:
    return BlockKey(0, b"%012d" % number)


def content(number: int, group: int = 0) -> Bytes:
    return np.random.default_rng((number, group)).integers(0, 256, SIZES[group], np.uint8)


def put(tier: Tier, number: int, group: int = 0) -> bool:
    block = content(number, group)
    return tier.put(key(number, group), lambda: block)


def got(tier: Tier, *keys: BlockKey) -> list[Bytes | None]:
    fetch = tier.fetch(keys)
    assert fetch.wait(60.0)
    return [fetch.found.get(block_key) for block_key in keys]


def is_content(found: Bytes | None, number: int, group: int = 0) -> bool:
    return found is not None and bool((found == content(number, group)).all())


def in_files(folder: Path) -> BlockFiles:
    return BlockFiles(folder, IDENTITY)


def room(store: BlockStore, blocks: int) -> int:
    return blocks * (SIZES[0] + store.overhead)


@pytest.fixture(params=["files", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    return in_files(tmp_path) if request.param == "files" else HostBlocks()


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the engine's log says."""
    messages, log = list[str](), logging.getLogger("llmc.engine")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def test_the_block_used_longest_ago_goes_first(store: BlockStore) -> None:
    tier = Tier(store, room(store, 3), SIZES)
    assert all(put(tier, number) for number in range(3))
    assert is_content(got(tier, key(0))[0], 0)
    assert put(tier, 3)
    assert [tier.holds(key(number)) for number in range(4)] == [True, False, True, True]
    assert tier.stats(0, 0).bytes <= room(store, 3)
    blocks = got(tier, *map(key, range(4)))
    assert blocks[1] is None and all(is_content(blocks[number], number) for number in (0, 2, 3))
    tier.close()


def test_what_somebody_relies_on_stays(store: BlockStore) -> None:
    tier = Tier(store, room(store, 2), SIZES)
    mine = content(7)
    assert all(tier.put(private(number), lambda: mine, pinned=True) for number in range(2))
    assert not put(tier, 0) and not tier.put(private(2), lambda: mine, pinned=True)
    tier.drop([private(0), private(5)])
    assert put(tier, 0) and is_content(got(tier, private(1))[0], 7)
    tier.close()


class HeldFiles(BlockFiles):
    """Files of which none is written before `may_write`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, IDENTITY)
        self.may_write = threading.Event()

    def write(self, key: BlockKey, content: Bytes) -> None:
        assert self.may_write.wait(60.0)
        super().write(key, content)


def test_a_block_is_found_before_it_is_written_and_little_waits_for_that(tmp_path: Path) -> None:
    store = HeldFiles(tmp_path)
    tier = Tier(store, room(store, 10), SIZES, staged_bytes=2 * SIZES[0])
    assert put(tier, 0) and put(tier, 1)
    assert not tier.wants(key(2)) and not put(tier, 2), "more than may wait"
    assert is_content(got(tier, key(1))[0], 1)
    assert tier.stats(0, 0).dropped_blocks == 2
    # Let go before it was written: nothing is left of it.
    tier.drop([key(0)])
    store.may_write.set()
    tier.settle()
    assert [path.name for path in tmp_path.iterdir()] == [f"{key(1).name.hex()}-0.kv"]
    tier.close()


def test_prefixes_are_found_by_the_next_process(tmp_path: Path) -> None:
    store = in_files(tmp_path)
    tier = Tier(store, room(store, 8), SIZES)
    assert all(put(tier, number, number % 2) for number in range(6))
    mine = content(9)
    assert tier.put(private(9), lambda: mine, pinned=True)
    tier.close()
    again = Tier(in_files(tmp_path), room(store, 8), SIZES)
    assert all(is_content(block, n, n % 2) for n, block in enumerate(got(again, *(key(n, n % 2) for n in range(6)))))
    assert got(again, private(9)) == [None], "nobody can ask for it any more"
    again.close()
    with_less = Tier(in_files(tmp_path), room(store, 2), SIZES)
    assert with_less.stats(0, 0).bytes <= room(store, 2) and with_less.stats(0, 0).blocks
    with_less.close()


def test_blocks_of_another_engine_are_not_read(tmp_path: Path) -> None:
    tier = Tier(in_files(tmp_path), 100_000, SIZES)
    assert put(tier, 0)
    tier.close()
    other = Tier(BlockFiles(tmp_path, sha256(b"another").digest()), 100_000, SIZES)
    assert got(other, key(0)) == [None] and not other.holds(key(0))
    assert other.stats(0, 0).damaged_blocks == 1
    other.close()
    renamed = in_files(tmp_path)
    renamed.write(key(1), content(1))
    renamed._path(key(1)).rename(renamed._path(key(2)))
    renamed.close()
    tier = Tier(in_files(tmp_path), 100_000, SIZES)
    assert tier.holds(key(2)) and got(tier, key(2)) == [None]
    tier.close()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


DAMAGES: list[Callable[[Path], None]] = [_flip, _cut, _empty, Path.unlink, _link]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_and_is_a_miss(damage: Callable[[Path], None], tmp_path: Path, told: list[str]) -> None:
    store = in_files(tmp_path)
    tier = Tier(store, room(store, 4), SIZES)
    assert put(tier, 0) and put(tier, 1)
    tier.settle()
    damage(store._path(key(0)))
    blocks = got(tier, key(0), key(1))
    assert blocks[0] is None and is_content(blocks[1], 1)
    assert str(tmp_path) in "".join(told) and not tier.holds(key(0))
    assert put(tier, 0) and is_content(got(tier, key(0))[0], 0), "it may come again"
    tier.close()


def test_what_is_damaged_before_the_start_is_told_and_foreign_files_stay(tmp_path: Path, told: list[str]) -> None:
    store = in_files(tmp_path)
    tier = Tier(store, room(store, 4), SIZES)
    assert put(tier, 0) and put(tier, 1)
    tier.close()
    _cut(store._path(key(0)))
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "0123-0.part").write_text("killed while this was written")
    tier = Tier(in_files(tmp_path), room(store, 4), SIZES)
    tier.settle()
    assert not tier.holds(key(0)) and is_content(got(tier, key(1))[0], 1)
    assert "letter.txt" in "".join(told) and "cut off" in "".join(told)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([store._path(key(1)).name, "letter.txt"])
    tier.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    first = in_files(tmp_path)
    with pytest.raises(BlockingIOError):
        in_files(tmp_path)
    first.close()
    in_files(tmp_path).close()


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file of this process may become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_blocks_that_nobody_relies_on(tmp_path: Path, told: list[str]) -> None:
    store = in_files(tmp_path)
    tier = Tier(store, room(store, 8), SIZES)
    assert put(tier, 0)
    tier.settle()
    mine = content(5)
    with full_disk(1000):
        assert put(tier, 1) and tier.put(private(5), lambda: mine, pinned=True)
        tier.settle()
    assert not tier.holds(key(1)) and tier.holds(private(5))
    assert "File too large" in "".join(told) and str(tmp_path) in "".join(told)
    assert is_content(got(tier, private(5))[0], 5), "what a request relies on stays in memory"
    assert is_content(got(tier, key(0))[0], 0)
    assert not list(tmp_path.glob("*.part"))
    tier.close()


def test_a_directory_that_goes_away_is_a_miss(tmp_path: Path, told: list[str]) -> None:
    folder = tmp_path / "kv"
    store = in_files(folder)
    tier = Tier(store, room(store, 8), SIZES)
    assert put(tier, 0)
    tier.settle()
    shutil.rmtree(folder)
    assert got(tier, key(0)) == [None]
    assert put(tier, 1)
    tier.settle()
    assert not tier.holds(key(1)) and "cannot keep blocks" in "".join(told)
    tier.close()
    assert not put(tier, 2) and got(tier, key(1)) == [None], "a closed tier refuses and finds nothing"


def swap_randomly(tier: Tier, count: int, damage: Callable[[BlockKey], None] | None = None) -> None:
    """Put, fetch, rely on, let go and damage blocks in a random order. What is found is what was put."""
    chooser, relied = random.Random(1), dict[BlockKey, int]()
    damaged, asked = set[BlockKey](), 0
    for turn in range(count):
        number, group = chooser.randrange(60), chooser.randrange(2)
        action = chooser.random()
        if action < 0.45:
            if tier.wants(key(number, group)):
                put(tier, number, group)
            damaged.discard(key(number, group))
        elif action < 0.85:
            names = [key(chooser.randrange(60), group) for _ in range(4)]
            for name, block in zip(names, got(tier, *names), strict=True):
                asked += block is not None
                number = next(n for n in range(60) if key(n, group) == name)
                assert block is None or is_content(block, number, group)
        elif action < 0.93:
            own, mine = private(turn), content(number)
            if tier.put(own, lambda mine=mine: mine, pinned=True):  # type: ignore[misc]
                relied[own] = number
        elif relied:
            own = chooser.choice([*relied])
            assert is_content(got(tier, own)[0], relied.pop(own))
            tier.drop([own])
        if damage is not None and turn % 20 == 0 and tier.holds(key(number, group)):
            damage(key(number, group))
    assert asked > count // 10, "hardly any block was found"
    for own, number in relied.items():
        assert is_content(got(tier, own)[0], number)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_swaps_are_exact(count: int, store: BlockStore) -> None:
    tier = Tier(store, room(store, 40), SIZES)
    swap_randomly(tier, count)
    tier.close()


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_swaps_are_exact_while_files_are_damaged(count: int, tmp_path: Path) -> None:
    store, chooser = in_files(tmp_path), random.Random(2)
    tier = Tier(store, room(store, 40), SIZES)

    def damage(name: BlockKey) -> None:
        tier.settle()
        if store._path(name).is_file():
            chooser.choice(DAMAGES[:4])(store._path(name))

    swap_randomly(tier, count, damage)
    assert tier.stats(0, 0).damaged_blocks
    tier.close()
