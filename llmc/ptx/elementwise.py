"""Instructions that compute each thread's result only from its own operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.lanes import Mask, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.team import Team

# The effect of an instruction on the threads of a mask.
Action = Callable[[Team, Mask], None]


@dataclass(frozen=True)
class Elementwise:
    """An instruction that computes each thread's value separately. sources: the types of the operands. function:
    computes values of the type `result` from the operands' values."""

    sources: tuple[np.dtype[Any], ...]
    result: np.dtype[Any]
    function: Callable[..., Values]


Chooser = Callable[[Modifiers], Elementwise]


def elementwise(chooser: Chooser) -> Callable[[Operands, Modifiers], Action]:
    """A builder of an opcode's actions. chooser: reads its modifiers."""

    def build(operands: Operands, modifiers: Modifiers) -> Action:
        chosen = chooser(modifiers)
        modifiers.finish()
        operands.count(1 + len(chosen.sources))
        return applied(operands, chosen)

    return build


def applied(operands: Operands, chosen: Elementwise) -> Action:
    """Apply a function to operands 1, 2 and so on, and write operand 0."""
    readers = [operands.reader(1 + i, source) for i, source in enumerate(chosen.sources)]
    write, function = operands.writer(0, chosen.result), chosen.function
    if len(readers) == 1:
        (first,) = readers
        return lambda team, mask: write(team, function(first(team)), mask)
    if len(readers) == 2:
        first, second = readers
        return lambda team, mask: write(team, function(first(team), second(team)), mask)
    return lambda team, mask: write(team, function(*(read(team) for read in readers)), mask)
