"""Matrix products of one to four tokens: y[t] = W·x[t], bound by reading W once; x may be normed on the way in.

Moves IN·OUT elements of W; x stays in the L1 cache. A program computes OUT_BLOCK outputs of all tokens. Its threads are
spread along IN, so that a warp reads 512 neighbouring bytes of a row of W at once. Each thread keeps its own partial
sums, which are combined at the end. With a norm, Σ x² is summed along with Σ W·(weight·x), and scales it at the end. W
may be stored without its zeros.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.launch_edge import ask_for_lines, wait_for_launch_before
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.kernels.products.sparse_tile import first_elements, sparse_tile
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget, Limit


@triton.jit
def gemv_kernel(
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
    tokens: int,
    scale: float,
    norm_ptr: tl.tensor,
    eps: float,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKENS tokens. Sums in fp32."""
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKENS
    product, up = gemv_sums(
        x_ptr, x_row_stride, weight_ptr, masks_ptr, starts_ptr, norm_ptr, eps, first_token, first_out, tokens,
        IN, OUT, GATED, NORMED, TOKENS, OUT_BLOCK, IN_BLOCK, AHEAD, LINES_AHEAD,
    )  # fmt: skip
    store_product(
        product, up, first_token, first_out, tl.arange(0, TOKENS)[:, None], tl.arange(0, OUT_BLOCK)[None, :], tokens,
        bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
        y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def gemv_sums(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: float,
    first_token: tl.tensor,
    first_out: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """W·x of a tile, [TOKENS, OUT_BLOCK], and of the gate's partner. NORMED: x goes through an RMS norm first.

    AHEAD: W is loaded two blocks of channels before it is multiplied, the first two before x is there; for whole
    blocks, at least two. LINES_AHEAD: otherwise, how many lines of each row of W are requested before x is there.
    """
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKENS)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    row = tl.minimum(first_out + out, OUT - 1)
    channel = tl.arange(0, IN_BLOCK)[None, None, :]
    x_row = x_ptr + tl.minimum(first_token + token, tokens - 1)[:, None, None] * x_row_stride + channel
    weight_row = weight_ptr + row[None, :, None] * IN + channel
    product = tl.zeros([TOKENS, OUT_BLOCK, IN_BLOCK], dtype=tl.float32)
    up = tl.zeros([TOKENS, OUT_BLOCK, IN_BLOCK], dtype=tl.float32)
    squares = tl.zeros([TOKENS, 1, IN_BLOCK], dtype=tl.float32)
    if AHEAD:
        w, w_up = _weights(weight_row, OUT * IN, GATED)
        next_w, next_up = _weights(weight_row + IN_BLOCK, OUT * IN, GATED)
        wait_for_launch_before()
        for start in range(0, IN - 2 * IN_BLOCK, IN_BLOCK):
            later_w, later_up = _weights(weight_row + start + 2 * IN_BLOCK, OUT * IN, GATED)
            x = tl.load(x_row + start).to(tl.float32)
            product, up, squares = _added(
                product, up, squares, x, w, w_up, norm_ptr, start + channel, IN, GATED, NORMED
            )
            w, w_up, next_w, next_up = next_w, next_up, later_w, later_up
        x = tl.load(x_row + IN - 2 * IN_BLOCK).to(tl.float32)
        place = IN - 2 * IN_BLOCK + channel
        product, up, squares = _added(product, up, squares, x, w, w_up, norm_ptr, place, IN, GATED, NORMED)
        x = tl.load(x_row + IN - IN_BLOCK).to(tl.float32)
        place = IN - IN_BLOCK + channel
        product, up, squares = _added(product, up, squares, x, next_w, next_up, norm_ptr, place, IN, GATED, NORMED)
    else:
        if LINES_AHEAD > 0:
            ask_for_lines(weight_ptr + row * IN, LINES_AHEAD)
            if GATED:
                ask_for_lines(weight_ptr + (row + OUT) * IN, LINES_AHEAD)
        wait_for_launch_before()
        MASKED: tl.constexpr = IN % IN_BLOCK != 0
        first, first_up = row, row
        if masks_ptr is not None:
            first = first_elements(masks_ptr, starts_ptr, row, 0, IN)
            if GATED:
                first_up = first_elements(masks_ptr, starts_ptr, row + OUT, 0, IN)
        for start in range(0, IN, IN_BLOCK):
            x = read_tile(x_row + start, start + channel < IN, MASKED).to(tl.float32)
            if masks_ptr is not None:
                w, first = sparse_tile(weight_ptr, masks_ptr, first, row, start, IN, IN_BLOCK)
                w = w[None, :, :]
            else:
                w = read_tile(weight_row + start, start + channel < IN, MASKED)
            w_up = w
            if GATED:
                if masks_ptr is not None:
                    w_up, first_up = sparse_tile(weight_ptr, masks_ptr, first_up, row + OUT, start, IN, IN_BLOCK)
                    w_up = w_up[None, :, :]
                else:
                    w_up = read_tile(weight_row + OUT * IN + start, start + channel < IN, MASKED)
            product, up, squares = _added(
                product, up, squares, x, w, w_up, norm_ptr, start + channel, IN, GATED, NORMED
            )
    sums, up_sums = tl.sum(product, axis=2), tl.sum(up, axis=2)
    if NORMED:
        norm = tl.rsqrt(tl.sum(squares, axis=2) / IN + eps)
        sums, up_sums = sums * norm, up_sums * norm
    return sums, up_sums


@triton.jit
def _weights(pointers: tl.tensor, partner: int, GATED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """A tile of W, and that of the gate's partner, `partner` elements behind it."""
    w = tl.load(pointers)
    up = w
    if GATED:
        up = tl.load(pointers + partner)
    return w, up


@triton.jit
def _added(
    product: tl.tensor,
    up: tl.tensor,
    squares: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    w_up: tl.tensor,
    norm_ptr: tl.tensor,
    channel: tl.tensor,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sums with the products of some channels."""
    if NORMED:
        squares += x * x
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + channel, mask=channel < IN, other=0.0)
    product += x * w.to(tl.float32)
    if GATED:
        up += x * w_up.to(tl.float32)
    return product, up, squares


gemv_budget = Budget(
    "gemv_kernel",
    (
        *STREAMING,
        *EDGE_FREE,
        Limit("shared_accesses", "each thread has its own sums: nothing is exchanged before the end", at_most=0),
        Limit("barriers", "warps that wait for each other leave the memory idle", at_most=0),
    ),
    streams=("weight_ptr",),
)
