"""mbarrier.*: make, invalidate, arrive, expect bytes, and wait for a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from llmc.ptx.access import Operands, Reader
from llmc.ptx.elementwise import Action
from llmc.ptx.global_memory import Indices
from llmc.ptx.lanes import BOOL, S64, U32, Mask, Values, constant
from llmc.ptx.modifiers import SHARED, Modifiers
from llmc.ptx.module import Instruction, Sink
from llmc.ptx.schedule import Strand
from llmc.ptx.shared_memory import SHARED_BASE
from llmc.ptx.team import End, Team, Test

_ONCE = constant(1, S64)


def build_mbarrier(operands: Operands, modifiers: Modifiers) -> Action:
    """All but the waits."""
    verb = modifiers.next()
    expects = verb == "arrive" and modifiers.flag("expect_tx")
    _finish(modifiers)
    if verb == "init":
        operands.count(2)
        return _acting(
            operands,
            0,
            operands.reader(1, U32),
            lambda team, o, lanes, n: team.mbarriers.init(o, lanes, n, operands.instruction),
        )
    if verb == "inval":
        operands.count(1)
        return _acting(
            operands,
            0,
            lambda team: _ONCE,
            lambda team, o, lanes, n: team.mbarriers.invalidate(o, lanes, operands.instruction),
        )
    if verb == "expect_tx":
        operands.count(2)
        return _acting(
            operands,
            0,
            operands.reader(1, U32),
            lambda team, o, lanes, n: team.mbarriers.expect(o, lanes, n, operands.instruction),
        )
    if verb != "arrive":
        raise modifiers.refused("the machine does not know it")
    operands.count(2, 3)
    if not isinstance(operands.given[0], Sink):
        raise operands.refused(operands.given[0])
    number = operands.reader(2, U32) if len(operands.given) == 3 else lambda team: _ONCE

    def arrive(team: Team, offset: int, lanes: Indices, numbers: Values) -> None:
        if expects:
            team.mbarriers.expect(offset, lanes, numbers, operands.instruction)
        once = np.ones(len(lanes), np.int64)
        team.mbarriers.arrive(offset, lanes, once if expects else numbers, operands.instruction)

    return _acting(operands, 1, number, arrive)


def _finish(modifiers: Modifiers) -> None:
    for names in (("release", "relaxed"), ("cta",), SHARED, ("b64",)):
        modifiers.maybe(*names)
    modifiers.finish()


def _acting(
    operands: Operands, place: int, number: Reader, act: Callable[[Team, int, Indices, Values], None]
) -> Action:
    """Act on each mbarrier that is named, for the threads that name it, each with its number."""
    address = operands.address(place)

    def run(team: Team, mask: Mask) -> None:
        for offset, chosen, lanes in named_offsets(team, address(team), mask, operands.instruction):
            act(team, offset, lanes, team.chosen(number(team), mask).astype(np.int64)[chosen])

    return run


def named_offsets(team: Team, addresses: Values, mask: Mask, at: Instruction) -> Iterator[tuple[int, Indices, Indices]]:
    """Each offset in shared memory that threads name, with which of the mask's threads do and their lanes."""
    lanes = team.lanes(mask)
    index, lanes, good = team.shared.locate(team.chosen(addresses, mask), lanes, 8, at)
    places = np.arange(len(lanes)) if good is None else np.flatnonzero(good)
    offsets = index % team.shared.row_bytes
    for offset in np.unique(offsets):
        at_offset = offsets == offset
        yield int(offset), places[at_offset], lanes[at_offset]


def build_wait(operands: Operands, modifiers: Modifiers, place: int) -> End:
    """mbarrier.try_wait and test_wait by parity: true once the phase has ended. try_wait waits until then."""
    verb = modifiers.next()
    modifiers.one_of("parity")
    modifiers.maybe("acquire")
    modifiers.maybe("cta")
    _finish(modifiers)
    operands.count(3, 4)
    write = operands.writer(0, BOOL)
    address, parity, at = operands.address(1), operands.reader(2, U32), operands.instruction

    def look(team: Team, mask: Mask) -> Mask:
        """The threads that find the phase ended."""
        parities = team.chosen(parity(team), mask).astype(np.int64) & 1
        ended = np.ones(len(parities), np.bool_)
        for offset, chosen, lanes in named_offsets(team, address(team), mask, at):
            ended[chosen] = team.mbarriers.test(offset, lanes, parities[chosen], at)
        return None if mask is None and ended.all() else team.placed(ended, mask)

    def describe(team: Team, row: int, thread: int) -> str:
        named = int(np.broadcast_to(address(team), team.shape)[row, thread]) - SHARED_BASE
        return team.mbarriers.state(named, row)

    def end(team: Team, strand: Strand) -> None:
        ended = look(team, strand.mask)
        if verb == "test_wait":
            write(team, np.ones((1, 1), np.bool_) if ended is None else ended, strand.mask)
            team.schedule.go(place + 1, strand.mask)
            return
        if ended is None or ended.any():
            write(team, np.ones((1, 1), np.bool_), strand.mask if ended is None else ended)
            team.schedule.go(place + 1, strand.mask if ended is None else ended)
        if ended is not None:
            waiting = team.whole(strand.mask) & ~ended
            if waiting.any():
                team.tests.append(Test(Strand(place, waiting), at, end, describe))

    if verb not in ("try_wait", "test_wait"):
        raise modifiers.refused("the machine does not know it")
    return end
