"""atom and red on global memory. Threads of one instruction take their turns in the order of their numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.global_access import ONES, check_dependency
from llmc.ptx.global_memory import Buffer, Indices
from llmc.ptx.lanes import NUMPY_TYPES, UNSIGNED, Mask, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.team import Team

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "exch": lambda old, new: new,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_TYPES = {
    "add": ("u32", "s32", "u64", "f32"),
    "and": ("b32", "b64"),
    "cas": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "max": ("u32", "s32", "u64", "s64"),
    "min": ("u32", "s32", "u64", "s64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}


def build_atomic(operands: Operands, modifiers: Modifiers) -> Action:
    """atom gives what was there before; red does not."""
    returns = modifiers.name == "atom"
    modifiers.maybe("relaxed", "acquire", "release", "acq_rel")
    modifiers.maybe("cta", "cluster", "gpu", "sys")
    modifiers.one_of("global")
    modifiers.maybe("relaxed", "acquire", "release", "acq_rel")
    modifiers.maybe("cta", "cluster", "gpu", "sys")
    operation = modifiers.one_of(*_TYPES)
    kind = modifiers.one_of(*_TYPES[operation])
    modifiers.finish()
    compares = operation == "cas"
    operands.count(2 + returns + compares)
    dtype = NUMPY_TYPES[kind]
    address = operands.address(returns)
    first = operands.reader(1 + returns, dtype)
    second = operands.reader(2 + returns, dtype) if compares else None
    write = operands.writer(0, dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize]) if returns else None
    nbytes = dtype.itemsize
    at = operands.instruction

    def run(team: Team, mask: Mask) -> None:
        lanes = team.lanes(mask)
        addresses = team.chosen(address(team), mask)
        values = team.chosen(first(team), mask)
        others = None if second is None else team.chosen(second(team), mask)
        before = np.zeros(len(lanes), dtype)
        for buffer, places, index in team.launch.memory.parts(
            addresses, nbytes, lambda c, d, p: team.tell(c, d, lanes[p], at)
        ):
            chosen = np.arange(len(lanes))[places]
            _check(team, buffer, lanes[chosen], index, nbytes, operands)
            if buffer.is_writable:
                selected = values[chosen], None if others is None else others[chosen]
                before[chosen] = _apply(buffer.words(nbytes).view(dtype), index, operation, *selected)
        if write is not None:
            write(team, team.placed(before, mask), mask)

    return run


def _check(team: Team, buffer: Buffer, lanes: Indices, index: Indices, nbytes: int, operands: Operands) -> None:
    check_dependency(team, buffer, lambda places: lanes[places], np.arange(len(lanes)), operands, stores=True)
    if not buffer.is_writable:
        team.tell(Check.READ_ONLY, buffer.name, lanes, operands.instruction)
    elif buffer.written is not None:
        blank = buffer.marks(nbytes).take(index) != ONES[nbytes]
        if blank.any():
            team.tell(Check.UNWRITTEN, buffer.name, lanes[blank], operands.instruction)


def _apply(words: Values, index: Indices, operation: str, values: Values, others: Values | None) -> Values:
    """Apply the operation of each thread sequentially. A word that keeps its value is not stored, because another
    process may be changing it."""
    before = np.empty(len(index), words.dtype)
    for turn, place in enumerate(index):
        old = before[turn] = words[place]
        if others is not None:
            new = others[turn] if old == values[turn] else old
        else:
            new = _FUNCTIONS[operation](old, values[turn])
        if new != old:
            words[place] = new
    return before
