"""Branches, returns and barriers: what decides where threads go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.lanes import S64, U32, Bools, Mask, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Guard, Immediate, Kernel, Symbol
from llmc.ptx.schedule import Strand
from llmc.ptx.team import End, Team


def guard_values(guard: Guard) -> Callable[[Team], Bools]:
    """A function that reads a guard."""
    index = guard.register.index
    if guard.is_negated:
        return lambda team: ~team.registers[index]
    return lambda team: team.registers[index]


def guarded_action(action: Action, guard: Guard | None) -> Action:
    """The action, only for threads whose guard is set."""
    if guard is None:
        return action
    read = guard_values(guard)

    def run(team: Team, mask: Mask) -> None:
        flags = read(team)
        if flags.all():
            action(team, mask)
        elif flags.any():
            chosen = flags if mask is None else mask & flags
            if mask is None or chosen.any():
                action(team, chosen)

    return run


def guarded_end(end: End, guard: Guard | None, place: int) -> End:
    """The end for those threads whose guard is set; others continue after it."""
    if guard is None:
        return end
    read = guard_values(guard)

    def run(team: Team, strand: Strand) -> None:
        flags = read(team)
        ending = flags if strand.mask is None else strand.mask & flags
        others = ~flags if strand.mask is None else strand.mask & ~flags
        if others.any():
            team.schedule.go(place + 1, others if ending.any() else strand.mask)
        if ending.any():
            end(team, Strand(place, ending if others.any() else strand.mask))

    return run


def collective(action: Action, place: int) -> End:
    """An action of whole warps: threads wait until the rest of their warp is there."""

    def end(team: Team, strand: Strand) -> None:
        mask, has_some = team.schedule.gather(place, strand.mask)
        if has_some:
            action(team, mask)
            team.schedule.go(place + 1, mask)

    return end


def build_branch(
    operands: Operands, modifiers: Modifiers, place: int, labels: Mapping[str, int], guard: Guard | None
) -> End:
    """Build the branch instruction `bra`."""
    modifiers.flag("uni")
    modifiers.finish()
    operands.count(1)
    target = operands.given[0]
    if not isinstance(target, Symbol) or target.name not in labels:
        raise operands.refused(target)
    destination = labels[target.name]
    if guard is None:
        return lambda team, strand: team.schedule.go(destination, strand.mask)
    read = guard_values(guard)
    return lambda team, strand: team.branch(strand, read(team), destination, place + 1)


def build_indexed_branch(operands: Operands, modifiers: Modifiers, kernel: Kernel) -> End:
    """Build `brx.idx`: each thread goes to the label of its index in a list."""
    modifiers.one_of("idx")
    modifiers.flag("uni")
    modifiers.finish()
    operands.count(2)
    table = operands.given[1]
    labels = kernel.branch_tables.get(table.name) if isinstance(table, Symbol) else None
    if labels is None or not kernel.labels.keys() >= set(labels):
        raise operands.refused(table)
    destinations = [kernel.labels[name] for name in labels]
    read = operands.reader(0, U32)
    at = operands.instruction

    def end(team: Team, strand: Strand) -> None:
        indices = np.broadcast_to(read(team), team.shape)
        threads = team.whole(strand.mask)
        for index in np.unique(indices[threads]):
            mask = threads & (indices == index)
            if index < len(destinations):
                team.schedule.go(destinations[index], mask)
            else:
                detail = f"the index of the branch is {index}; its list has {len(destinations)} labels"
                team.tell(Check.BOUNDS, detail, team.lanes(mask), at)
                team.end(mask, at)

    return end


def build_return(operands: Operands, modifiers: Modifiers) -> End:
    """ret and exit."""
    modifiers.flag("uni")
    modifiers.finish()
    operands.count(0)
    at = operands.instruction
    return lambda team, strand: team.end(strand.mask, at)


def build_barrier(operands: Operands, modifiers: Modifiers, place: int) -> End:
    """bar.sync, bar.arrive and barrier.*: numbers may be in registers, the same for all threads of a warp."""
    modifiers.maybe("cta")
    waits = modifiers.one_of("sync", "arrive") == "sync"
    modifiers.flag("aligned")
    modifiers.finish()
    operands.count(1, 2)
    readers = [
        operands.reader(i, S64) if isinstance(operand, Immediate) else _number(operands, i)
        for i, operand in enumerate(operands.given)
    ]
    following = place + 1 if waits else None
    at = operands.instruction

    def arrive(team: Team, mask: Mask) -> None:
        numbers = readers[0](team)
        counts = readers[1](team) if len(readers) > 1 else None
        for number, count, part in _alike(team, numbers, counts, mask):
            team.barriers.arrive(number, count, part, following, at)

    def end(team: Team, strand: Strand) -> None:
        mask, has_some = team.schedule.gather(place, strand.mask)
        if has_some:
            arrive(team, mask)
            if not waits:
                team.schedule.go(place + 1, mask)

    return end


def _number(operands: Operands, place: int) -> Callable[[Team], Values]:
    read = operands.reader(place, np.dtype("u4"))
    return lambda team: read(team).astype(S64)


def _alike(team: Team, numbers: Values, counts: Values | None, mask: Mask) -> list[tuple[int, int | None, Mask]]:
    """The threads of the mask by the barrier that they name."""
    if numbers.size == 1 and (counts is None or counts.size == 1):
        return [(int(numbers.flat[0]), None if counts is None else int(counts.flat[0]), mask)]
    named = np.broadcast_to(numbers, team.shape)
    wanted = np.broadcast_to(np.int64(-1) if counts is None else counts, team.shape)
    groups: list[tuple[int, int | None, Mask]] = []
    for number, count in np.unique(np.stack([team.chosen(named, mask), team.chosen(wanted, mask)]), axis=1).T:
        matching = (named == number) & (wanted == count)
        groups.append((int(number), None if count < 0 else int(count), matching if mask is None else matching & mask))
    return groups
