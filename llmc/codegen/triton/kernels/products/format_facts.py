"""Facts about a format of codes for use in kernels at compile time, from its record (llmc/formats/code_format.py)."""

import triton

from llmc.formats.code_format import CodeFormat


@triton.constexpr_function
def record_of(format: str) -> CodeFormat:
    """The format's record. Imported here: Triton copies what such a function names outside of it, and cannot copy the
    mapping."""
    from llmc.formats.code_format import CODE_FORMATS

    return CODE_FORMATS[format]


@triton.constexpr_function
def low_bits(format: str) -> int:
    """Bits of a code in the first plane of a row (codegen/triton/code_rows.py), or all 8."""
    return int(record_of(format).planes[0])


@triton.constexpr_function
def above_bits(format: str) -> int:
    """Bits of a code in the plane behind the first; 0 where there is none."""
    return int(record_of(format).bits - record_of(format).planes[0])


@triton.constexpr_function
def in_pairs(format: str) -> bool:
    """Whether a place of a row is of two channels, 16 apart."""
    return bool(record_of(format).planes[0] < 8)


@triton.constexpr_function
def stored_zero(format: str) -> int:
    """The integer 0 as it is stored; codes of 8 bits keep their sign."""
    return 0 if record_of(format).bits == 8 else record_of(format).unsigned_shift


@triton.constexpr_function
def is_blocked(format: str) -> bool:
    """Whether scales are more than a float a group."""
    return bool(record_of(format).is_blocked)


@triton.constexpr_function
def by_group(format: str, groups: int) -> bool:
    """Whether scales multiply the sums of a group, and not those of the whole row."""
    return bool(groups > 1 or record_of(format).is_blocked)


@triton.constexpr_function
def halves(format: str, columns: int, groups: int) -> bool:
    """Whether the two channels of a place are of two groups, of 16 channels each. columns, groups: of a row."""
    return bool(in_pairs(format) and by_group(format, groups) and columns == 16 * groups)


@triton.constexpr_function
def step_bits(format: str) -> int:
    """Bits of a step."""
    steps = record_of(format).steps
    return 0 if steps is None else steps.bits


@triton.constexpr_function
def least_step(format: str) -> int:
    """The step of a scale that is stored as 0."""
    steps = record_of(format).steps
    return 0 if steps is None else steps.least


@triton.constexpr_function
def step_field_bits(format: str) -> int:
    """Bits of the steps of one group, of its scale and of its minimum."""
    return int(record_of(format).step_field_bits)


@triton.constexpr_function
def step_row_bytes(format: str, groups: int) -> int:
    """Bytes of the steps of a row of groups (codegen/triton/code_rows.py)."""
    return int(-(-groups * record_of(format).step_field_bits // 8))


@triton.constexpr_function
def has_integer_table(format: str) -> bool:
    """Whether codes are places in a table of integers."""
    return bool(record_of(format).is_blocked and record_of(format).table is not None)


@triton.constexpr_function
def table_word(format: str, index: int) -> int:
    """Four integers of a table from place 4·index on, as the bytes of an int32, each plus 128."""
    table = record_of(format).table
    word: int = sum((int(table[4 * index + i]) + 128) << 8 * i for i in range(4))
    return word - (1 << 32) if word >> 31 else word
