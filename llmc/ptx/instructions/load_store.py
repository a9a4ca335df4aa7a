"""ld and st, of every state space. A vector of numbers is one access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.ptx.access import Operands, Reader, Writer
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.global_access import read_global, write_global
from llmc.ptx.global_memory import WORDS, Indices
from llmc.ptx.lanes import NUMPY_TYPES, UNSIGNED, Mask, Values, whole
from llmc.ptx.modifiers import SHARED, Modifiers
from llmc.ptx.team import Team

# Modifiers of caches and of memory order between blocks, without effect because instructions execute sequentially.
_HINTS = (
    *("weak", "volatile", "relaxed", "acquire", "release", "mmio", "cta", "cluster", "gpu", "sys", "nc"),
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "L2::cache_hint"),
    *(f"L1::{name}" for name in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *(f"L2::{name}" for name in ("64B", "128B", "256B", "evict_first", "evict_last", "evict_normal")),
)
_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def build_ld(operands: Operands, modifiers: Modifiers) -> Action:
    """ld, by its state space."""
    space, count, kind = _parts(modifiers)
    operands.count(2, 3)
    dtype = NUMPY_TYPES[kind]
    targets = operands.items(0)
    if len(targets) != count:
        raise operands.refused(operands.given[0])
    plain = dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize]
    writers = [operands.writer_of(target, plain) for target in targets]
    if space == "param":
        return _load_parameter(operands, writers, plain)
    nbytes = count * dtype.itemsize
    load = {"global": _global_loader, "local": _local_loader}.get(space, _shared_loader)(operands, nbytes)

    def run(team: Team, mask: Mask) -> None:
        words, shape, loaded = load(team, mask)
        parts = _parted(words, plain, count)
        for write, part in zip(writers, parts, strict=True):
            write(team, _spread(part, shape, loaded), loaded)

    return run


# The result of an access: its words, the shape of its threads, and the threads that got one.
_Loaded = tuple[Values, tuple[int, ...], Mask]
_Loader = Callable[[Team, Mask], _Loaded]


def _spread(values: Values, shape: tuple[int, ...], taken: Mask) -> Values:
    """The values of the threads that are taken, at their places."""
    if taken is None:
        return values.reshape(shape)
    spread = np.zeros(taken.shape, values.dtype)
    spread[taken] = values
    return spread


def _parted(words: Values, dtype: np.dtype[Any], count: int) -> list[Values]:
    if count == 1:
        return [words.view(dtype)]
    return list(np.ascontiguousarray(words.view(dtype).reshape(-1, count).T))


def joined(parts: list[Values], count: int) -> Values:
    """Join several values of each thread to one word, the first in its lowest bytes."""
    if count == 1:
        return parts[0]
    word = np.empty((len(parts[0]), count), parts[0].dtype)
    for place, part in enumerate(parts):
        word[:, place] = part
    return word.view(WORDS[count * parts[0].dtype.itemsize])[:, 0]


def _parts(modifiers: Modifiers) -> tuple[str, int, str]:
    """State space, elements and type."""
    while modifiers.maybe(*_HINTS):
        pass
    space = modifiers.one_of("param", "global", "local", "const", *SHARED)
    vector = modifiers.maybe("v2", "v4", "v8")
    kind = modifiers.one_of(*_TYPES)
    modifiers.finish()
    count = int(vector[1:]) if vector else 1
    if count * NUMPY_TYPES[kind].itemsize not in WORDS:
        raise modifiers.refused("the machine knows accesses of up to 16 bytes")
    return ("global" if space == "const" else space), count, kind


def _load_parameter(operands: Operands, writers: list[Writer], dtype: np.dtype[Any]) -> Action:
    """Parameters are in their own space; an access beyond their end is reported."""
    read, size = operands.address(1), dtype.itemsize

    def run(team: Team, mask: Mask) -> None:
        offsets = read(team)
        known = team.launch.parameters
        wrong = (offsets < 0) | (offsets + size * len(writers) > len(known))
        if wrong.any():
            team.tell(Check.BOUNDS, "the launch's parameters", team.lanes(mask), operands.instruction)
            offsets = np.where(wrong, 0, offsets)
        for place, write in enumerate(writers):
            octets = known[offsets[..., None] + (place * size + np.arange(size))]
            write(team, np.ascontiguousarray(octets).view(dtype)[..., 0], mask)

    return run


# ---- global memory ---------------------------------------------------------------------------------------------------


def _reach(team: Team, addresses: Values, mask: Mask) -> tuple[Values, Mask]:
    """The accessed addresses as a flat array, and the mask with the smallest shape that addresses and mask need."""
    if mask is None:
        return addresses.reshape(-1), None
    shape = np.broadcast_shapes(addresses.shape, mask.shape)
    chosen = np.broadcast_to(mask, shape)
    return np.broadcast_to(addresses, shape)[chosen], chosen


def _lanes_of(team: Team, places: Indices, shape: tuple[int, ...], chosen: Mask) -> Indices:
    """The threads of some accesses, of several that do the same the first. places: among the addresses of `_reach`."""
    flat = places if chosen is None else np.flatnonzero(chosen)[places]
    rows, threads = flat // shape[1], flat % shape[1]
    return rows * team.threads + threads


def _global_loader(operands: Operands, nbytes: int) -> _Loader:
    read = operands.address(1)

    def load(team: Team, mask: Mask) -> _Loaded:
        addresses = read(team)
        wanted, chosen = _reach(team, addresses, mask)
        shape = addresses.shape if chosen is None else chosen.shape
        words = read_global(team, operands, wanted, nbytes, lambda places: _lanes_of(team, places, shape, chosen))
        return words, shape, chosen

    return load


def build_st(operands: Operands, modifiers: Modifiers) -> Action:
    """st, by its state space."""
    space, count, kind = _parts(modifiers)
    operands.count(2, 3)
    dtype = UNSIGNED[NUMPY_TYPES[kind].itemsize]
    sources = operands.items(1)
    if len(sources) != count or space == "param":
        raise operands.refused(operands.given[1])
    readers = [operands.reader_of(source, dtype) for source in sources]
    store = {"global": _store_global, "local": _store_local}.get(space, _store_shared)
    return store(operands, operands.address(0), readers, count * dtype.itemsize)


def _store_global(operands: Operands, address: Reader, readers: list[Reader], nbytes: int) -> Action:
    def run(team: Team, mask: Mask) -> None:
        addresses, values = address(team), [read(team) for read in readers]
        shape = np.broadcast_shapes(addresses.shape, *(value.shape for value in values))
        wanted, chosen = _reach(team, np.broadcast_to(addresses, shape), mask)
        full = shape if chosen is None else chosen.shape
        parts = [_flat(value, full, chosen) for value in values]
        write_global(
            team, operands, wanted, joined(parts, len(parts)), nbytes, lambda p: _lanes_of(team, p, full, chosen)
        )

    return run


def _flat(value: Values, shape: tuple[int, ...], chosen: Mask) -> Values:
    spread = np.broadcast_to(value, shape)
    return spread.reshape(-1) if chosen is None else spread[chosen]


# ---- shared memory ---------------------------------------------------------------------------------------------------


def _shared_loader(operands: Operands, nbytes: int) -> _Loader:
    read = operands.address(1)
    at = operands.instruction

    def load(team: Team, mask: Mask) -> _Loaded:
        asking = team.lanes(mask)
        index, lanes, good = team.shared.locate(team.chosen(read(team), mask), asking, nbytes, at)
        team.shared.shadow.read(index, nbytes, lanes, at)
        words = team.shared.load(index, nbytes)
        if good is not None:
            words, loaded = np.zeros(len(asking), WORDS[nbytes]), words
            words[good] = loaded
        return words, team.shape, None if mask is None else whole(mask, team.shape)

    return load


def _store_shared(operands: Operands, address: Reader, readers: list[Reader], nbytes: int) -> Action:
    at = operands.instruction

    def run(team: Team, mask: Mask) -> None:
        index, lanes, good = team.shared.locate(team.chosen(address(team), mask), team.lanes(mask), nbytes, at)
        parts = [team.chosen(read(team), mask) for read in readers]
        parts = parts if good is None else [part[good] for part in parts]
        team.shared.store_checked(index, nbytes, lanes, joined(parts, len(parts)), at)

    return run


# ---- local memory ----------------------------------------------------------------------------------------------------


def _local_index(team: Team, addresses: Values, mask: Mask, nbytes: int, operands: Operands) -> Indices:
    offsets, lanes = team.chosen(addresses, mask), team.lanes(mask)
    per_thread = team.launch.plan.local_bytes
    wrong = (offsets < 0) | (offsets + nbytes > per_thread) | (offsets & nbytes - 1 != 0)
    if wrong.any():
        place = f"local memory at byte {int(offsets[wrong][0])}, of {per_thread}"
        team.tell(Check.BOUNDS, place, lanes[wrong], operands.instruction)
        offsets = np.where(wrong, 0, offsets)
    index: Indices = (lanes * per_thread + offsets) >> nbytes.bit_length() - 1
    return index


def _local_loader(operands: Operands, nbytes: int) -> _Loader:
    read = operands.address(1)

    def load(team: Team, mask: Mask) -> _Loaded:
        index = _local_index(team, read(team), mask, nbytes, operands)
        words = team.local.view(WORDS[nbytes]).take(index)
        return words, team.shape, None if mask is None else whole(mask, team.shape)

    return load


def _store_local(operands: Operands, address: Reader, readers: list[Reader], nbytes: int) -> Action:
    def run(team: Team, mask: Mask) -> None:
        index = _local_index(team, address(team), mask, nbytes, operands)
        parts = [team.chosen(read(team), mask) for read in readers]
        team.local.view(WORDS[nbytes])[index] = joined(parts, len(parts))

    return run
