"""llmc::embedding of a table without its zeros: y[t] = row ids[t] of elements or symmetric codes behind masks.

Memory-bound: moves T·C elements, masks, and what is not zero of the rows looked up. The table may be lm_head's.
"""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call, stored_weight
from llmc.codegen.triton.kernel import DeviceLaunch, named_arguments
from llmc.codegen.triton.kernels.products.sparse_tile import first_elements, sparse_tile
from llmc.codegen.triton.kernels.rows.row_block import row_block
from llmc.program import Layout
from llmc.program.launch_arguments import Argument

_LEAST_COLUMNS, _MOST_COLUMNS = 64, 1024


@triton.jit
def sparse_embedding_kernel(
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): the j-th BLOCK columns of token t. scales: of codes, GROUPS of them a row."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token + tl.arange(0, 1)).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)[None, :]
    first = first_elements(masks_ptr, starts_ptr, row, start, COLUMNS)
    tile, _ = sparse_tile(values_ptr, masks_ptr, first, row, start, COLUMNS, BLOCK)
    y = tile.to(tl.float32)
    inside = column < COLUMNS
    if scales_ptr is not None:
        group = row[:, None] * GROUPS + column // (COLUMNS // GROUPS)
        y *= tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * y_row_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def sparse_lookup(call: Call) -> DeviceLaunch:
    """The launch of an embedding whose table is stored without its zeros."""
    stored = stored_weight(call)
    has_codes = stored.op is torch.ops.llmc.sparse_codes.default
    columns = stored.plain("columns")
    values, masks, starts = stored.sparse_rows(
        torch.int8 if has_codes else call.plain("dtype") or stored.dtype("values")
    )
    block = min(max(row_block(columns, most_rows=1).columns, _LEAST_COLUMNS), _MOST_COLUMNS)
    weight: dict[str, Argument] = {"values_ptr": values, "masks_ptr": masks, "starts_ptr": starts}
    scales = stored.weight("scales", Layout.ROWS) if has_codes else None
    arguments = named_arguments(sparse_embedding_kernel, call, **weight, scales_ptr=scales)
    constants = {"COLUMNS": columns, "GROUPS": stored.shape("scales")[1] if has_codes else 1, "BLOCK": block}
    grid = (str(call.count("ids")), str(triton.cdiv(columns, block)))
    return DeviceLaunch(sparse_embedding_kernel, arguments, constants, grid)
