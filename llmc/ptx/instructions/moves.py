"""mov: a value, an address, a special register; or several small registers in one, and back."""

from typing import Any

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.lanes import BOOL, NUMPY_TYPES, UNSIGNED, Mask
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Register, Vector
from llmc.ptx.team import Team

_TYPES = ("pred", "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


def build_mov(operands: Operands, modifiers: Modifiers) -> Action:
    """mov, by the kinds of its operands."""
    kind = modifiers.one_of(*_TYPES)
    modifiers.finish()
    operands.count(2)
    dtype = NUMPY_TYPES[kind]
    target, source = operands.given
    if isinstance(source, Vector):
        return _joined(operands, dtype.itemsize)
    if isinstance(target, Vector):
        return _parted(operands, dtype.itemsize)
    if isinstance(target, Register) and isinstance(source, Register):
        if (target.nbytes, target.is_predicate) != (source.nbytes, source.is_predicate):
            raise operands.refused(source)
        # The value as it is: arithmetic and bits need no conversion between them.
        return lambda team, mask: team.write(target, team.registers[source.index], mask)
    plain = dtype if dtype is BOOL else UNSIGNED[dtype.itemsize]
    read, write = operands.reader(1, plain), operands.writer(0, plain)
    return lambda team, mask: write(team, read(team), mask)


def _part(operands: Operands, place: int, nbytes: int) -> np.dtype[Any]:
    """The type of an element of a vector that is a word of `nbytes` bytes."""
    count = len(operands.items(place))
    if count not in (2, 4) or nbytes // count not in UNSIGNED:
        raise operands.refused(operands.given[place])
    return UNSIGNED[nbytes // count]


def _joined(operands: Operands, nbytes: int) -> Action:
    """`mov.b32 d, {a, b}`: the first is the lowest part."""
    parts = operands.items(1)
    size, whole = _part(operands, 1, nbytes), UNSIGNED[nbytes]
    readers = [operands.reader_of(part, size) for part in parts]
    write = operands.writer(0, whole)

    def run(team: Team, mask: Mask) -> None:
        word = readers[0](team).astype(whole)
        for place, read in enumerate(readers[1:], 1):
            word = word | read(team).astype(whole) << whole.type(8 * size.itemsize * place)
        write(team, word, mask)

    return run


def _parted(operands: Operands, nbytes: int) -> Action:
    """`mov.b32 {a, b}, d`."""
    parts = operands.items(0)
    size, whole = _part(operands, 0, nbytes), UNSIGNED[nbytes]
    writers = [operands.writer_of(part, size) for part in parts]
    read = operands.reader(1, whole)

    def run(team: Team, mask: Mask) -> None:
        word = read(team)
        for place, write in enumerate(writers):
            write(team, (word >> whole.type(8 * size.itemsize * place)).astype(size), mask)

    return run
