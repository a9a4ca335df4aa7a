"""llmc::embedding of a table in codes: y[t] = the decoded row ids[t] of a quantized table, rounded once.

Memory-bound: reads T·C codes, of the rows that are looked up, and writes T·C elements. The table may be lm_head's.
"""

import triton
import triton.language as tl

from llmc.codegen.call import Call, stored_weight
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import DeviceLaunch, named_arguments
from llmc.codegen.triton.kernels.products.coded_product import code_pointers, group_constants
from llmc.codegen.triton.kernels.products.format_facts import in_pairs
from llmc.codegen.triton.kernels.products.group_scales import scale_and_minimum
from llmc.codegen.triton.kernels.products.weight_codes import code_values, load_above, load_codes, low_codes
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.program import code_rows_layout


@triton.jit
def code_embedding_kernel(
    ids_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK columns of token t."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    IN_PAIRS: tl.constexpr = in_pairs(FORMAT)
    PLACES: tl.constexpr = (COLUMNS + 31) // 32 * 16 if IN_PAIRS else ROW_BYTES
    place = column // 32 * 16 + column % 16 if IN_PAIRS else column
    half = column % 32 // 16 * 4 if IN_PAIRS else 0
    codes = load_codes(codes_ptr + row * ROW_BYTES, place, inside, FORMAT, True)
    above = load_above(codes_ptr + row * ROW_BYTES, place, inside, PLACES, FORMAT, True)
    codes = low_codes(codes >> half if IN_PAIRS else codes, above >> half if IN_PAIRS else above, FORMAT)
    group = column // (COLUMNS // GROUPS)
    scales, minima = scale_and_minimum(
        scales_ptr, minima_ptr, steps_ptr, row, group, inside, GROUPS, FLOATS, FORMAT, True
    )
    zeros = tl.zeros([BLOCK], dtype=tl.float32)
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + row * GROUPS + group, mask=inside, other=0).to(tl.float32)
    y = code_values(codes, zeros, FORMAT) * scales
    if minima_ptr is not None:
        y -= minima
    tl.store(y_ptr + token * y_row_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def code_lookup(call: Call) -> DeviceLaunch:
    """The launch of an embedding whose table is in codes."""
    stored = stored_weight(call)
    columns, format = stored.shape("codes")[1], stored.plain("format")
    block = min(row_block(columns, most_rows=1).columns, 1024)
    return DeviceLaunch(
        code_embedding_kernel,
        named_arguments(code_embedding_kernel, call, **code_pointers(stored.code_rows())),
        {
            "COLUMNS": columns,
            "FORMAT": format,
            "ROW_BYTES": row_bytes(columns, code_rows_layout(format)),
            **group_constants(stored),
            "BLOCK": block,
        },
        (str(call.count("ids")), str(triton.cdiv(columns, block))),
    )
