"""The states of a program as bytes: slots of one sequence each, one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmc.program import Program

if TYPE_CHECKING:
    from torch import Tensor


def copy_slot(program: Program, memories: Iterable[Tensor], source: int, destination: int) -> None:
    """Copy a slot of every state to another. memories: uint8, in the order of Program.state_names."""
    for state, memory in zip(program.states, memories, strict=True):
        to_byte, from_byte = destination * state.nbytes, source * state.nbytes
        memory[to_byte : to_byte + state.nbytes] = memory[from_byte : from_byte + state.nbytes]
