"""wgmma: products of matrices by the four warps of a warpgroup, asynchronously.

B is in shared memory, A there or in registers, the sums in registers. Products are computed at the instruction;
accesses to operands or sums before the wait are findings.
"""

import re
from dataclasses import dataclass

import numpy as np

from llmc.ptx.access import Operands, Reader
from llmc.ptx.element_types import ELEMENT_TYPES, WHOLE_TYPES, ElementType, sum_of_products
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.fragments import matrix_a, matrix_c, registers_c
from llmc.ptx.global_memory import Indices
from llmc.ptx.lanes import BOOL, F32, S32, U32, U64, Mask, Values
from llmc.ptx.matrix_descriptor import CHUNK, MatrixDescriptor, chunk_addresses, chunk_offsets
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Register, Vector
from llmc.ptx.team import Team

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_ROWS = 64


def build_wgmma(operands: Operands, modifiers: Modifiers) -> Action:
    """wgmma.*"""
    verb = modifiers.next()
    for modifier in ("sync", "aligned"):
        modifiers.one_of(modifier)
    if verb == "mma_async":
        return _mma_async(operands, modifiers)
    modifiers.finish()
    if verb == "fence":
        operands.count(0)
        return lambda team, mask: team.warpgroups.fence(mask)
    if verb == "commit_group":
        operands.count(0)
        return lambda team, mask: team.warpgroups.commit(mask)
    if verb != "wait_group":
        raise modifiers.refused("the machine does not know it")
    operands.count(1)
    most = operands.number(0)
    return lambda team, mask: team.warpgroups.wait(mask, most)


@dataclass(frozen=True)
class _Matrix:
    """An operand in shared memory. lines: number of lines along M or N."""

    descriptor: Reader
    element: ElementType
    lines: int
    depth: int
    is_transposed: bool

    def read(self, team: Team, leaders: Indices, operands: Operands) -> tuple[Values, Indices]:
        """[warpgroups, lines, depth] numbers, and where they lie: [warpgroups, runs of 16 bytes]."""
        bits = team.chosen(self.descriptor(team), None)[leaders]
        first = MatrixDescriptor.from_bits(int(bits[0]))
        rows, columns = (self.depth, self.lines) if self.is_transposed else (self.lines, self.depth)
        row_bytes = columns * self.element.bits.itemsize
        strides = first.leading, first.stride, first.swizzle_bytes
        offsets = chunk_offsets(*strides, rows, row_bytes, self.is_transposed)
        starts = (bits & np.uint64(0x3FFF)).astype(np.int64) * CHUNK
        if first.base_offset or (bits >> np.uint64(16) != bits[0] >> np.uint64(16)).any():
            detail = "the descriptors of the warpgroups differ, or have a base offset"
            team.tell(Check.DESCRIPTOR, detail, leaders, operands.instruction)
        addresses = chunk_addresses(starts, offsets, first.swizzle_bytes)
        owners = np.repeat(leaders, offsets.size)
        index, _, good = team.shared.locate(addresses.reshape(-1), owners, CHUNK, operands.instruction)
        if good is not None:
            index, inside = owners // team.threads * team.shared.row_bytes, index
            index[good] = inside
        octets = team.shared.load(index, CHUNK)
        numbers = self.element.number(octets.view(self.element.bits).reshape(len(leaders), rows, columns))
        return (numbers.transpose(0, 2, 1) if self.is_transposed else numbers), index.reshape(len(leaders), -1)


def _mma_async(operands: Operands, modifiers: Modifiers) -> Action:
    shape = _SHAPE.fullmatch(modifiers.next())
    if shape is None:
        raise modifiers.refused("the machine supports only m64")
    columns, depth = int(shape[1]), int(shape[2])
    saturates = modifiers.flag("satfinite")
    b_kind, a_kind, d_kind = (modifiers.last() for _ in range(3))
    modifiers.finish()
    is_whole = a_kind in WHOLE_TYPES
    if {a_kind, b_kind} - set(ELEMENT_TYPES) or d_kind != ("s32" if is_whole else "f32"):
        raise modifiers.refused(f"the machine does not know sums in .{d_kind} of .{a_kind} and .{b_kind}")
    a_type, b_type = ELEMENT_TYPES[a_kind], ELEMENT_TYPES[b_kind]
    dtype = S32 if is_whole else F32
    sums = [operands.register_of(item) for item in operands.items(0)]
    if len(sums) != columns // 2 or depth * a_type.bits.itemsize != 32:
        raise modifiers.refused("its number of registers or its depth differs from the manual's")
    negates_a, negates_b, transposes_a, transposes_b = _switches(operands, is_whole)
    in_registers = isinstance(operands.given[1], Vector)
    a_registers = [operands.register_of(item) for item in operands.items(1)] if in_registers else []
    a_readers = [operands.reader_of(register, U32) for register in a_registers]
    a_matrix = None if in_registers else _Matrix(operands.reader(1, U64), a_type, _ROWS, depth, transposes_a)
    b_matrix = _Matrix(operands.reader(2, U64), b_type, columns, depth, transposes_b)
    readers = [operands.reader_of(register, dtype) for register in sums]
    adds = operands.reader(3, BOOL)

    def run(team: Team, mask: Mask) -> None:
        leaders = team.warpgroup_leaders(mask, operands.instruction)
        if not len(leaders):
            return
        team.warpgroups.begin(sums, a_registers, mask, operands.instruction)
        second, runs = b_matrix.read(team, leaders, operands)
        if a_matrix is None:
            words = np.stack([team.chosen(read(team), mask).reshape(-1, 32) for read in a_readers], axis=2)
            first = matrix_a(a_type.of_words(words), a_type.per_word).reshape(-1, _ROWS, depth)
        else:
            first, own = a_matrix.read(team, leaders, operands)
            runs = np.concatenate([runs, own], axis=1)
        team.warpgroups.read(runs, leaders, operands.instruction)
        first = -first if negates_a else first
        third = np.stack([team.chosen(read(team), mask).reshape(-1, 32) for read in readers], axis=2)
        before = matrix_c(third).reshape(-1, _ROWS, columns)
        keeps = team.chosen(adds(team), None)[leaders]
        before = before if keeps.all() else np.where(keeps[:, None, None], before, dtype.type(0))
        turned = second.transpose(0, 2, 1)
        total = sum_of_products(first, -turned if negates_b else turned, before, is_whole, saturates)
        results = registers_c(total.reshape(-1, 16, columns))
        for register, values in zip(sums, results, strict=True):
            team.write(register, team.placed(values.reshape(-1), mask), mask)

    return run


def _switches(operands: Operands, is_whole: bool) -> tuple[bool, bool, bool, bool]:
    """Return which of A and B are negated, and which are transposed, from the numbers after the predicate, if there are
    any."""
    has_two = isinstance(operands.given[1], Register)
    operands.count(*((4,) if is_whole else (6, 8 if has_two else 7)))
    flags = [operands.number(place) for place in range(4, len(operands.given))]
    negates = [sign == -1 for sign in flags[:2]] or [False, False]
    turns = [turn == 1 for turn in flags[2:]]
    turns = [False] * (2 - len(turns)) + turns
    return negates[0], negates[1], turns[0], turns[1]
