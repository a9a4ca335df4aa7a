"""Accesses of threads to global memory: loads and stores, with their checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.finding import Check
from llmc.ptx.global_memory import WORDS, Buffer, Indices
from llmc.ptx.lanes import Values
from llmc.ptx.team import Team

# That every byte of a word has been written.
ONES = {nbytes: np.frombuffer(b"\1" * nbytes, word)[0] for nbytes, word in WORDS.items()}


def read_global(
    team: Team, operands: Operands, addresses: Values, nbytes: int, lanes: Callable[[Indices], Indices]
) -> Values:
    """The words at the addresses; zeros at those that cannot be read. lanes: the threads of some of the addresses."""
    at = operands.instruction
    words: Values | None = None
    for buffer, places, index in team.launch.memory.parts(
        addresses, nbytes, lambda c, d, p: team.tell(c, d, lanes(p), at)
    ):
        values: Values = buffer.words(nbytes).take(index)
        positions = np.arange(len(addresses))[places]
        check_dependency(team, buffer, lanes, positions, operands, stores=False)
        if buffer.written is not None:
            marks = buffer.marks(nbytes).take(index)
            is_blank = (marks.view(np.uint8).reshape(-1, nbytes) == 0).any(axis=1)
            if is_blank.any():
                team.tell(Check.UNWRITTEN, buffer.name, lanes(positions[is_blank]), at)
        if isinstance(places, slice):
            return values
        words = np.zeros(len(addresses), WORDS[nbytes]) if words is None else words
        words[places] = values
    return np.zeros(len(addresses), WORDS[nbytes]) if words is None else words


def write_global(
    team: Team, operands: Operands, addresses: Values, words: Values, nbytes: int, lanes: Callable[[Indices], Indices]
) -> None:
    """Store a word at each address. lanes: the threads of some of the addresses."""
    at = operands.instruction
    memory = team.launch.memory
    for buffer, places, index in memory.parts(addresses, nbytes, lambda c, d, p: team.tell(c, d, lanes(p), at)):
        positions = np.arange(len(addresses))[places]
        check_dependency(team, buffer, lanes, positions, operands, stores=True)
        if not buffer.is_writable:
            team.tell(Check.READ_ONLY, buffer.name, lanes(positions), at)
            continue
        buffer.words(nbytes)[index] = words[places]
        if buffer.written is not None:
            buffer.marks(nbytes)[index] = ONES[nbytes]


def check_dependency(
    team: Team,
    buffer: Buffer,
    lanes: Callable[[Indices], Indices],
    places: Indices,
    operands: Operands,
    *,
    stores: bool,
) -> None:
    """Check that no thread stores, or loads what an earlier launch may still write, before it has waited. lanes: the
    threads of some accesses; places: which of these are to the buffer."""
    if not team.launch.waits or not (stores or buffer.may_change):
        return
    early = lanes(places)
    early = early[~team.has_waited[early]]
    if len(early):
        access = "stores to" if stores else "loads from"
        team.tell(Check.GRID_DEPENDENCY, f"it {access} {buffer.name}", early, operands.instruction)
