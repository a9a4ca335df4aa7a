"""ldmatrix, stmatrix and mma.sync: matrices that are spread over the registers of a warp."""

import re

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.element_types import ELEMENT_TYPES, WHOLE_TYPES, sum_of_products
from llmc.ptx.elementwise import Action
from llmc.ptx.fragments import matrix_a, matrix_b, matrix_c, registers_c
from llmc.ptx.global_memory import Indices
from llmc.ptx.lanes import F32, S32, U16, U32, Mask, Values
from llmc.ptx.modifiers import SHARED, Modifiers
from llmc.ptx.team import Team

_ROW_BYTES = 16
_SHAPE = re.compile(r"m16n8k(\d+)")


def _matrix_modifiers(operands: Operands, modifiers: Modifiers, vector: int) -> tuple[int, bool]:
    """Return the number of 8 × 8 matrices, and whether they are transposed."""
    for modifier in ("sync", "aligned", "m8n8"):
        modifiers.one_of(modifier)
    count = int(modifiers.one_of("x1", "x2", "x4")[1:])
    is_transposed = modifiers.flag("trans")
    modifiers.one_of(*SHARED)
    modifiers.one_of("b16")
    modifiers.finish()
    operands.count(2)
    if len(operands.items(vector)) != count:
        raise operands.refused(operands.given[vector])
    return count, is_transposed


def _row_lanes(lanes: Indices, count: int) -> Indices:
    """The threads of whole warps that hold row addresses, eight per matrix: [warps · 8 · count]."""
    return lanes.reshape(-1, 32)[:, : 8 * count].reshape(-1)


def build_ldmatrix(operands: Operands, modifiers: Modifiers) -> Action:
    """Each thread gets two neighbours of row lane / 4; transposed, of column lane / 4."""
    count, is_transposed = _matrix_modifiers(operands, modifiers, 0)
    writers = [operands.writer_of(item, U32) for item in operands.items(0)]
    address, at = operands.address(1), operands.instruction

    def run(team: Team, mask: Mask) -> None:
        every = team.lanes(mask)
        rows = _row_lanes(every, count)
        addresses = np.broadcast_to(address(team), team.shape).reshape(-1)[rows]
        index, lanes, good = team.shared.locate(addresses, rows, _ROW_BYTES, at)
        team.shared.shadow.read(index, _ROW_BYTES, lanes, at, whole_warp=True)
        words = team.shared.load(index, _ROW_BYTES)
        if good is not None:
            words, loaded = np.zeros(len(rows), words.dtype), words
            words[good] = loaded
        halves = words.view(U16).reshape(-1, count, 8, 8)
        if is_transposed:
            halves = np.ascontiguousarray(halves.transpose(0, 1, 3, 2))
        registers = np.ascontiguousarray(halves.view(U32).reshape(-1, count, 32).transpose(1, 0, 2))
        for write, register in zip(writers, registers, strict=True):
            write(team, team.placed(register.reshape(-1), mask), mask)

    return run


def build_stmatrix(operands: Operands, modifiers: Modifiers) -> Action:
    """ldmatrix the other way."""
    count, is_transposed = _matrix_modifiers(operands, modifiers, 1)
    readers = [operands.reader_of(item, U32) for item in operands.items(1)]
    address, at = operands.address(0), operands.instruction

    def run(team: Team, mask: Mask) -> None:
        rows = _row_lanes(team.lanes(mask), count)
        registers = np.stack([team.chosen(read(team), mask).reshape(-1, 32) for read in readers], axis=1)
        halves = registers.view(U16).reshape(-1, count, 8, 8)
        if is_transposed:
            halves = halves.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(halves).view(np.complex128).reshape(-1)
        addresses = np.broadcast_to(address(team), team.shape).reshape(-1)[rows]
        index, lanes, good = team.shared.locate(addresses, rows, _ROW_BYTES, at)
        team.shared.shadow.write(index, _ROW_BYTES, lanes, at, whole_warp=True)
        team.shared.store(index, _ROW_BYTES, words if good is None else words[good])

    return run


def build_mma(operands: Operands, modifiers: Modifiers) -> Action:
    """mma.sync of 16 rows and 8 columns."""
    for modifier in ("sync", "aligned"):
        modifiers.one_of(modifier)
    shape = _SHAPE.fullmatch(modifiers.next())
    if shape is None:
        raise modifiers.refused("the machine supports only m16n8")
    modifiers.one_of("row")
    modifiers.one_of("col")
    saturates = modifiers.flag("satfinite")
    c_kind, b_kind, a_kind, d_kind = (modifiers.last() for _ in range(4))
    modifiers.finish()
    operands.count(4)
    is_whole = a_kind in WHOLE_TYPES
    accumulator = "s32" if is_whole else "f32"
    if a_kind not in ELEMENT_TYPES or b_kind not in ELEMENT_TYPES or (b_kind in WHOLE_TYPES) != is_whole:
        raise modifiers.refused(f"the machine does not know products of .{a_kind} and .{b_kind}")
    if (c_kind, d_kind) != (accumulator, accumulator):
        raise modifiers.refused(f"the machine supports only sums in .{accumulator}")
    a_type, b_type = ELEMENT_TYPES[a_kind], ELEMENT_TYPES[b_kind]
    columns = int(shape[1])
    words = columns // (4 * a_type.per_word)
    dtype = S32 if is_whole else F32
    a, b, c = ([operands.reader_of(item, U32 if i < 2 else dtype) for item in operands.items(1 + i)] for i in range(3))
    writers = [operands.writer_of(item, dtype) for item in operands.items(0)]
    if (len(a), len(b), len(c), len(writers)) != (2 * words, words, 4, 4) or words not in (1, 2):
        raise modifiers.refused("its number of registers differs from the manual's")

    def run(team: Team, mask: Mask) -> None:
        first = matrix_a(a_type.of_words(_registers(team, a, mask)), a_type.per_word)
        second = matrix_b(b_type.of_words(_registers(team, b, mask)), b_type.per_word)
        third = matrix_c(_registers(team, c, mask))
        total = sum_of_products(first, second, third, is_whole, saturates)
        for write, register in zip(writers, registers_c(total), strict=True):
            write(team, team.placed(register.reshape(-1), mask), mask)

    return run


def _registers(team: Team, readers: list, mask: Mask) -> Values:  # type: ignore[type-arg]
    """[warps, lanes, registers]."""
    return np.stack([team.chosen(read(team), mask).reshape(-1, 32) for read in readers], axis=2)
