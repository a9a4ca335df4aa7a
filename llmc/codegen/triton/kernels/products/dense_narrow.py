"""Matrix products of a few dozen tokens: yᵀ = W·xᵀ on the matrix units, with the sum over channels split in parts.

Bound by reading W once: moves IN·OUT elements of W, T·(IN + OUT) of x and y, and 2·SPLITS·T·OUT fp32 partial sums. W is
the left operand, whose tile is never narrower than 64, so that few tokens waste nothing. Where OUT alone gives too few
programs to keep the memory busy, SPLITS of them share an output tile (product_store.py). x may be normed on the way in,
and W stored without its zeros, which its tiles get back (sparse_tile.py).
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.agreed_sums import sum_of_products
from llmc.codegen.triton.kernels.launch_edge import ask_for_lines, wait_for_launch_before
from llmc.codegen.triton.kernels.products.operand_tiles import multiply, read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product, store_split_product
from llmc.codegen.triton.kernels.products.sparse_tile import first_elements, sparse_tile
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget


@triton.jit
def narrow_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_row_stride: int,
    adapters_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    tokens: int,
    scale: float,
    norm_ptr: tl.tensor,
    eps: float,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> None:
    """Program (j, i, s): the j-th OUT_BLOCK outputs of the i-th TOKEN_BLOCK tokens over the s-th part of IN.

    NORMED requires SPLITS = 1.
    """
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKEN_BLOCK
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKEN_BLOCK)
    split = tl.program_id(2)
    product, up = narrow_sums(
        x_ptr, x_row_stride, weight_ptr, masks_ptr, starts_ptr, norm_ptr, eps, first_token, first_out, split, tokens,
        IN, OUT, GATED, NORMED, TOKEN_BLOCK, OUT_BLOCK, IN_BLOCK, SPLITS, LINES_AHEAD,
    )  # fmt: skip
    if SPLITS == 1:
        store_product(
            product, up, first_token, first_out, token[None, :], out[:, None], tokens,
            bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
            y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
        )  # fmt: skip
    else:
        store_split_product(
            product, up, split, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), partials_ptr, arrivals_ptr,
            first_token, first_out, token[None, :], out[:, None], tokens,
            bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
            y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION, SPLITS,
        )  # fmt: skip


@triton.jit
def narrow_sums(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: float,
    first_token: tl.tensor,
    first_out: tl.tensor,
    split: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """W·xᵀ of a tile, [OUT_BLOCK, TOKEN_BLOCK], and of the gate's partner. LINES_AHEAD: how many lines of each row of W
    are requested before x is there.

    NORMED: of x after an RMS norm with the weight norm_ptr. Then x times that weight is rounded to x's dtype for the
    matrix units, and the sums are scaled by the norm of each row.
    """
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKEN_BLOCK)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    row = tl.minimum(first_out + out, OUT - 1)
    weight_row = weight_ptr + row[:, None] * IN
    x_row = x_ptr + tl.minimum(first_token + token, tokens - 1)[None, :] * x_row_stride
    part = tl.arange(0, IN_BLOCK)
    PER_SPLIT: tl.constexpr = (IN + SPLITS * IN_BLOCK - 1) // (SPLITS * IN_BLOCK) * IN_BLOCK
    MASKED: tl.constexpr = IN % (SPLITS * IN_BLOCK) != 0
    product = tl.zeros([OUT_BLOCK, TOKEN_BLOCK], dtype=tl.float32)
    up = tl.zeros([OUT_BLOCK, TOKEN_BLOCK], dtype=tl.float32)
    squares = tl.zeros([TOKEN_BLOCK], dtype=tl.float32)
    if LINES_AHEAD > 0:
        ask_for_lines(weight_ptr + row * IN + split * PER_SPLIT, LINES_AHEAD)
        if GATED:
            ask_for_lines(weight_ptr + (row + OUT) * IN + split * PER_SPLIT, LINES_AHEAD)
        wait_for_launch_before()
    first, first_up = row, row
    if masks_ptr is not None:
        first = first_elements(masks_ptr, starts_ptr, row, split * PER_SPLIT, IN)
        if GATED:
            first_up = first_elements(masks_ptr, starts_ptr, row + OUT, split * PER_SPLIT, IN)
    for start in range(0, PER_SPLIT, IN_BLOCK):
        channel = split * PER_SPLIT + start + part
        x = read_tile(x_row + channel[:, None], (channel < IN)[:, None], MASKED)
        if masks_ptr is not None:
            w, first = sparse_tile(weight_ptr, masks_ptr, first, row, split * PER_SPLIT + start, IN, IN_BLOCK)
        else:
            w = read_tile(weight_row + channel[None, :], (channel < IN)[None, :], MASKED)
        if NORMED:
            wide = x.to(tl.float32)
            squares += sum_of_products(wide, wide, 0)
            if norm_ptr is not None:
                wide *= tl.load(norm_ptr + channel, mask=channel < IN, other=0.0)[:, None]
            x = wide.to(x.dtype)
        product = multiply(w, x, product)
        if GATED:
            if masks_ptr is not None:
                up_w, first_up = sparse_tile(
                    weight_ptr, masks_ptr, first_up, row + OUT, split * PER_SPLIT + start, IN, IN_BLOCK
                )
            else:
                up_w = read_tile(weight_row + OUT * IN + channel[None, :], (channel < IN)[None, :], MASKED)
            up = multiply(up_w, x, up)
    if NORMED:
        norm = tl.rsqrt(squares / IN + eps)[None, :]
        product, up = product * norm, up * norm
    return product, up


narrow_budget = Budget("narrow_kernel", (*STREAMING, *EDGE_FREE), streams=("weight_ptr",))
