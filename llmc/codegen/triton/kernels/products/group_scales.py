"""Device code for the scales of a quantized weight's groups; no other kernel code depends on their representation.

A scale is one float per group. In blocked formats it is a float shared by several groups times the group's own small
integer, the step, and so is the minimum. Steps are stored as STEP_ROWS (codegen/triton/code_rows.py).
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.format_facts import least_step, step_bits, step_field_bits, step_row_bytes
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.weight_codes import small_floats


@triton.jit
def scale_and_minimum(
    scales_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    inside: tl.tensor,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The scale and the minimum of a group of a row's columns, fp32; the minimum is 0 where the format has none.

    row, group, inside: of shapes that broadcast. FLOATS: of a row's scales, each of which GROUPS / FLOATS groups share.
    If MASKED, results are 0 outside of `inside` and nothing is read.
    """
    place = row * GROUPS + group
    if FLOATS < GROUPS:
        place = row * FLOATS + group // (GROUPS // FLOATS)
    scale = read_tile(scales_ptr + place, inside, MASKED).to(tl.float32)
    minimum = tl.zeros_like(scale)
    if minima_ptr is not None:
        minimum = read_tile(minima_ptr + place, inside, MASKED).to(tl.float32)
    if steps_ptr is not None:
        BITS: tl.constexpr = step_bits(FORMAT)
        steps = _steps(steps_ptr + row * step_row_bytes(FORMAT, GROUPS), group, inside, GROUPS, FORMAT, MASKED)
        scale *= small_floats((steps & ((1 << BITS) - 1)) + least_step(FORMAT))
        if minima_ptr is not None:
            minimum *= small_floats((steps >> BITS) & ((1 << BITS) - 1))
    return scale, minimum


@triton.jit
def second_group(first: tl.tensor, IN: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """The group of 16 columns after `first`, which the high bits of the same bytes belong to; the last one where a row
    of IN columns ends between them."""
    if IN % 32 != 0:
        return tl.minimum(first + 1, GROUPS - 1)
    else:
        return first + 1


@triton.jit
def _steps(
    row_ptr: tl.tensor,
    group: tl.tensor,
    inside: tl.tensor,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The bits of a group's steps from bit 0 on, int32."""
    FIELD: tl.constexpr = step_field_bits(FORMAT)
    if FIELD == 8:
        return read_tile(row_ptr + group, inside, MASKED).to(tl.int32)
    else:
        LAST: tl.constexpr = step_row_bytes(FORMAT, GROUPS) - 1
        byte = group * FIELD // 8
        low = read_tile(row_ptr + byte, inside, MASKED).to(tl.int32)
        # A row's last steps may end with its last byte.
        high = read_tile(row_ptr + tl.minimum(byte + 1, LAST), inside, MASKED).to(tl.int32)
        return (low | (high << 8)) >> (group * FIELD % 8)
