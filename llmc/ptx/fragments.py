"""Which element of a matrix each thread of a warp holds, for `mma` and `ldmatrix`: the tables of the PTX manual.

Every register holds the elements that fit into 32 bits. For thread `lane`, group is lane / 4 and place is lane % 4:

    A, 16 rows:   register r, element e: row group + 8·(r mod 2), column place·E + e + 4·E·(r / 2)
    B, 8 columns: register r, element e: row place·E + e + 4·E·r, column group
    C and D:      register r (32 bits):  row group + 8·(r / 2), column 2·place + r mod 2
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]


def matrix_a(registers: Words, per_word: int) -> Words:
    """[warps, 16, columns] of elements [warps, lanes, registers, E]."""
    warps, _, count, _ = registers.shape
    parts = registers.reshape(warps, 8, 4, count // 2, 2, per_word)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, 2 * count * per_word)


def matrix_b(registers: Words, per_word: int) -> Words:
    """[warps, rows, 8] of elements [warps, lanes, registers, E]."""
    warps, _, count, _ = registers.shape
    parts = registers.reshape(warps, 8, 4, count, per_word)
    return parts.transpose(0, 3, 2, 4, 1).reshape(warps, 4 * count * per_word, 8)


def matrix_c(registers: Words) -> Words:
    """[warps, 16, columns] of words [warps, lanes, registers]; 8 columns for each four registers."""
    warps, _, count = registers.shape
    parts = registers.reshape(warps, 8, 4, count // 4, 2, 2)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, 2 * count)


def registers_c(matrix: Words) -> Words:
    """The inverse of `matrix_c`: [registers, warps, lanes]."""
    warps, _, columns = matrix.shape
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(columns // 2, warps, 32)
