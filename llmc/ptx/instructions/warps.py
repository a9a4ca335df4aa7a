"""Instructions of a whole warp: shuffles, reductions, votes and elections.

Lanes that the instruction's mask leaves out are not expected: Triton and CUDA's intrinsics name all lanes that run.
"""

from collections.abc import Callable

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.lanes import BOOL, NUMPY_TYPES, U32, Mask, Values, whole
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Immediate, Pair, Sink
from llmc.ptx.team import Team

_LANES = np.arange(32)
_ALL = 0xFFFFFFFF


def build_shfl(operands: Operands, modifiers: Modifiers) -> Action:
    """shfl.sync: each thread reads another one's value."""
    modifiers.one_of("sync")
    mode = modifiers.one_of("up", "down", "bfly", "idx")
    modifiers.one_of("b32")
    modifiers.finish()
    operands.count(5)
    target = operands.given[0]
    results = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    write, write_found = operands.writer_of(results[0], U32), operands.writer_of(results[1], BOOL)
    wants_found = not isinstance(results[1], Sink)
    value, other, bounds = operands.reader(1, U32), operands.reader(2, U32), operands.reader(3, U32)
    has_constants = all(isinstance(operands.given[place], Immediate) for place in (2, 3))

    def run(team: Team, mask: Mask) -> None:
        values = value(team)
        if values.shape[1] == 1 and not wants_found:
            write(team, values, mask)
            return
        sources, is_found = _sources(mode, *(_of_warps(read(team)) for read in (other, bounds)))
        warps = _by_warp(values, team)
        if has_constants:
            shuffled = np.take(warps, sources.reshape(32), axis=2)
        else:
            values, lanes = np.broadcast_arrays(warps, sources)
            shuffled = np.take_along_axis(values, lanes, axis=2)
        write(team, shuffled.reshape(len(shuffled), -1), mask)
        if wants_found:
            flags = np.broadcast_to(is_found, shuffled.shape)
            write_found(team, flags.reshape(len(shuffled), -1), mask)

    return everyone_checked(run, operands, 4)


def _sources(mode: str, other: Values, bounds: Values) -> tuple[Values, Values]:
    """The lane that each lane reads, and whether that lies in its segment; [blocks, warps, 32]."""
    b, c = other.astype(np.int64) & 31, bounds.astype(np.int64)
    segment, clamp = c >> 8 & 31, c & 31
    last = _LANES & segment | clamp & ~segment
    if mode == "up":
        lane = _LANES - b
        inside = lane >= last
    else:
        first = _LANES & segment
        lane = {"down": _LANES + b, "bfly": _LANES ^ b, "idx": first | b & ~segment}[mode]
        inside = lane <= last
    return np.where(inside, lane, _LANES), inside


def _of_warps(value: Values) -> Values:
    """[blocks, warps or 1, 32 or 1]."""
    return value[:, :, None] if value.shape[1] == 1 else value.reshape(len(value), -1, 32)


def _by_warp(value: Values, team: Team) -> Values:
    """[blocks, warps, 32]."""
    return np.broadcast_to(value, (len(value), team.threads)).reshape(len(value), -1, 32)


_Reduce = Callable[..., Values]
_REDUCTIONS: dict[str, tuple[_Reduce, dict[str, int]]] = {
    "add": (np.add.reduce, {"s32": 0, "u32": 0}),
    "min": (np.minimum.reduce, {"s32": 2**31 - 1, "u32": 2**32 - 1}),
    "max": (np.maximum.reduce, {"s32": -(2**31), "u32": 0}),
    "and": (np.bitwise_and.reduce, {"b32": 2**32 - 1}),
    "or": (np.bitwise_or.reduce, {"b32": 0}),
    "xor": (np.bitwise_xor.reduce, {"b32": 0}),
}


def build_redux(operands: Operands, modifiers: Modifiers) -> Action:
    """redux.sync: one value of a warp's."""
    modifiers.one_of("sync")
    reduce, neutral = _REDUCTIONS[modifiers.one_of(*_REDUCTIONS)]
    kind = modifiers.last()
    modifiers.finish()
    if kind not in neutral:
        raise modifiers.refused(f"the machine does not know it of .{kind}")
    operands.count(3)
    dtype = NUMPY_TYPES[kind]
    value, write = operands.reader(1, dtype), operands.writer(0, dtype)

    def run(team: Team, mask: Mask) -> None:
        warps = _by_warp(value(team), team)
        if mask is not None:
            warps = np.where(_by_warp(mask, team), warps, dtype.type(neutral[kind]))
        reduced = reduce(warps, axis=2, dtype=dtype)
        write(team, np.repeat(reduced, 32, axis=1), mask)

    return everyone_checked(run, operands, 2)


def build_elect(operands: Operands, modifiers: Modifiers) -> Action:
    """elect.sync: the first thread of each warp that runs."""
    modifiers.one_of("sync")
    modifiers.finish()
    operands.count(2)
    target = operands.given[0]
    if not isinstance(target, Pair):
        raise operands.refused(target)
    write, write_chosen = operands.writer_of(target.first, U32), operands.writer_of(target.second, BOOL)

    def run(team: Team, mask: Mask) -> None:
        running = np.ones((1, team.threads), np.bool_) if mask is None else whole(mask, team.shape)
        leaders = running.reshape(len(running), -1, 32).argmax(axis=2).astype(U32)
        repeated = np.repeat(leaders, 32, axis=1)
        write(team, repeated, mask)
        write_chosen(team, team.specials["%laneid"] == repeated, mask)

    return everyone_checked(run, operands, 1)


def build_vote(operands: Operands, modifiers: Modifiers) -> Action:
    """vote.sync: all, any, uni, or the predicates of a warp as bits."""
    modifiers.one_of("sync")
    mode = modifiers.one_of("all", "any", "uni", "ballot")
    modifiers.one_of("b32" if mode == "ballot" else "pred")
    modifiers.finish()
    operands.count(3)
    predicate, write = operands.reader(1, BOOL), operands.writer(0, U32 if mode == "ballot" else BOOL)

    def run(team: Team, mask: Mask) -> None:
        running = np.ones((1, team.threads), np.bool_) if mask is None else mask
        flags, runs = _by_warp(predicate(team), team), _by_warp(running, team)
        all_set, any_set = (flags | ~runs).all(axis=2), (flags & runs).any(axis=2)
        if mode == "ballot":
            votes = ((flags & runs) * (np.uint32(1) << _LANES.astype(U32))).sum(axis=2, dtype=U32)
        else:
            votes = {"all": all_set, "any": any_set, "uni": all_set | ~any_set}[mode]
        write(team, np.repeat(votes, 32, axis=1), mask)

    return everyone_checked(run, operands, 2)


def build_warp_barrier(operands: Operands, modifiers: Modifiers) -> Action:
    """bar.warp.sync: orders the accesses of the warp's threads before it and after it."""
    modifiers.finish()
    operands.count(1)
    return everyone_checked(lambda team, mask: team.order.tick(team.order.warps_of(mask)), operands, 0)


def everyone_checked(action: Action, operands: Operands, place: int) -> Action:
    """Return the action with a check that the instruction's mask names all lanes."""
    named = operands.reader(place, U32)
    if isinstance(operands.given[place], Immediate):
        if operands.number(place) & _ALL != _ALL:
            raise operands.refused(operands.given[place])
        return action

    def run(team: Team, mask: Mask) -> None:
        if not (team.chosen(named(team), mask) == _ALL).all():
            team.tell(Check.DIVERGENCE, "its mask leaves lanes of the warp out", team.lanes(mask), operands.instruction)
        action(team, mask)

    return run
