"""How instructions reach their operands: readers of values and writers of results, made once for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmc.ptx.lanes import BOOL, F32, F64, S64, SIGNED, UNSIGNED, Mask, Values, as_type, constant
from llmc.ptx.module import Address, Immediate, Instruction, Operand, Register, Sink, Special, Symbol, Vector
from llmc.ptx.refusal import Refused
from llmc.ptx.team import Team

Reader = Callable[[Team], Values]
Writer = Callable[[Team, Values, Mask], None]
DType = np.dtype[Any]


class Operands:
    """The operands of one instruction. symbols: the addresses of variables."""

    def __init__(self, instruction: Instruction, symbols: Mapping[str, int]) -> None:
        self.instruction, self._symbols = instruction, symbols
        self.given = instruction.operands

    def count(self, *allowed: int) -> None:
        """Raise Refused for another number of operands."""
        if len(self.given) not in allowed:
            raise Refused(f"{self.instruction.opcode} has {len(self.given)} operands", self.instruction)

    def _operand(self, place: int) -> Operand:
        if place >= len(self.given):
            raise Refused(f"{self.instruction.opcode} has {len(self.given)} operands", self.instruction)
        return self.given[place]

    def reader(self, place: int, dtype: DType) -> Reader:
        """A function that reads an operand as values of a type; a longer register is truncated to its lower bits."""
        return self.reader_of(self._operand(place), dtype)

    def reader_of(self, operand: Operand, dtype: DType) -> Reader:
        """A reader, like `reader`, of an operand inside another."""
        if isinstance(operand, Register):
            return self._register_reader(operand, dtype)
        if isinstance(operand, Special):
            return self._special_reader(operand, dtype)
        if isinstance(operand, Immediate):
            if operand.float_bytes not in (0, dtype.itemsize) and dtype.kind != "f":
                raise self.refused(operand)
            value = _immediate(operand, dtype)
        elif isinstance(operand, Symbol):
            value = constant(self._address_of(operand), dtype)
        else:
            raise self.refused(operand)
        return lambda team: value

    def _register_reader(self, register: Register, dtype: DType) -> Reader:
        index = register.index
        if register.is_predicate != (dtype is BOOL) or register.nbytes not in UNSIGNED:
            raise self.refused(register)
        if register.nbytes == dtype.itemsize:

            def read(team: Team) -> Values:
                value = team.registers[index]
                return value if value.dtype is dtype else as_type(value, dtype)

            return read
        if register.nbytes < dtype.itemsize:
            raise self.refused(register)
        wide, narrow = UNSIGNED[register.nbytes], UNSIGNED[dtype.itemsize]
        return lambda team: as_type(team.registers[index], wide).astype(narrow).view(dtype)

    def _special_reader(self, special: Special, dtype: DType) -> Reader:
        name = special.name
        if name not in KNOWN_SPECIALS or dtype.itemsize < 4:
            raise Refused(f"{self.instruction.opcode}: the machine does not know {name}", self.instruction)
        return lambda team: team.specials[name].astype(dtype, copy=False)

    def _address_of(self, symbol: Symbol) -> int:
        if symbol.name not in self._symbols:
            raise Refused(f"{self.instruction.opcode}: there is no variable {symbol.name}", self.instruction)
        return self._symbols[symbol.name] + symbol.offset

    def address(self, place: int) -> Reader:
        """A function that reads an address, including its offset, as 64-bit integers."""
        operand = self._operand(place)
        if not isinstance(operand, Address):
            raise self.refused(operand)
        offset, base = operand.offset, operand.base
        if isinstance(base, Register):
            read = self._register_reader(base, UNSIGNED.get(base.nbytes, S64))
            if not offset:
                return lambda team: read(team).astype(S64)
            return lambda team: read(team).astype(S64) + offset
        value = self.reader_of(base, S64)
        return lambda team: value(team) + offset

    def writer(self, place: int, dtype: DType) -> Writer:
        """A function that writes values of a type to an operand; a longer register is extended by sign or zeros."""
        return self.writer_of(self._operand(place), dtype)

    def writer_of(self, operand: Operand, dtype: DType) -> Writer:
        """A writer, like `writer`, of an operand inside another."""
        if isinstance(operand, Sink):
            return lambda team, value, mask: None
        register = self.register_of(operand)
        is_of_kind = register.is_predicate == (dtype is BOOL) and register.nbytes in UNSIGNED
        if not is_of_kind or register.nbytes < dtype.itemsize:
            raise self.refused(register)
        if register.nbytes == dtype.itemsize:
            return lambda team, value, mask: team.write(register, value, mask)
        wide = (SIGNED if dtype.kind == "i" else UNSIGNED)[register.nbytes]
        plain = dtype if dtype.kind in "iu" else UNSIGNED[dtype.itemsize]
        return lambda team, value, mask: team.write(register, as_type(value, plain).astype(wide), mask)

    def register_of(self, operand: Operand) -> Register:
        """The operand, which must be a register."""
        if not isinstance(operand, Register):
            raise self.refused(operand)
        return operand

    def items(self, place: int) -> tuple[Operand, ...]:
        """The elements of a vector; of another operand, itself."""
        operand = self._operand(place)
        return operand.items if isinstance(operand, Vector) else (operand,)

    def number(self, place: int) -> int:
        """An operand that is a whole number in the text."""
        operand = self._operand(place)
        if not isinstance(operand, Immediate) or operand.float_bytes:
            raise self.refused(operand)
        return operand.value

    def refused(self, operand: Operand) -> Refused:
        """Return the refusal of an operand of a kind that the opcode does not take."""
        return Refused(f"{self.instruction.opcode} does not take {operand} there", self.instruction)


# Special registers that Team fills.
KNOWN_SPECIALS = frozenset(
    f"%{name}"
    for name in (
        *(f"{register}.{axis}" for register in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
        "laneid",
        "warpid",
    )
)


def _immediate(operand: Immediate, dtype: DType) -> Values:
    if dtype is BOOL:
        return np.full((1, 1), operand.value != 0)
    if operand.float_bytes:
        value = constant(operand.value, F32 if operand.float_bytes == 4 else F64)
        return value if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
    return constant(operand.value, dtype)
