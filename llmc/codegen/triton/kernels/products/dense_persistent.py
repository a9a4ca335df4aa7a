"""Matrix products of many tokens with tensor descriptors (TMA): y = x·Wᵀ, one program a multiprocessor.

Bound by arithmetic, 2·T·IN·OUT operations. The copy engine fills the tiles of x and W in shared memory ahead of the
matrix units (wgmma on sm_90, tcgen05 on sm_100), zero-filled past the ends, so that no thread computes an address. Each
program walks over tiles of y, PROGRAMS apart, so that the loads of the next tile run during the stores of the last.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.dense_tile import tile_of
from llmc.codegen.triton.kernels.products.operand_tiles import multiply
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.machine_code.budget import Budget


@triton.jit
def persistent_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    """Tiles [TOKEN_BLOCK, OUT_BLOCK] of y, PROGRAMS apart; gated, the same tile of gate and of up.

    Must have: x and W start at multiples of 16 bytes, and so do their rows.
    """
    WIDTH: tl.constexpr = 2 * OUT if GATED else OUT
    x_tiles = tl.make_tensor_descriptor(x_ptr, [tokens, IN], [x_row_stride, 1], [TOKEN_BLOCK, IN_BLOCK])
    w_tiles = tl.make_tensor_descriptor(weight_ptr, [WIDTH, IN], [IN, 1], [OUT_BLOCK, IN_BLOCK])
    token_tiles, out_tiles = tl.cdiv(tokens, TOKEN_BLOCK), tl.cdiv(OUT, OUT_BLOCK)
    for number in tl.range(tl.program_id(0), token_tiles * out_tiles, PROGRAMS):
        token_tile, out_tile = tile_of(number, token_tiles, out_tiles, GROUP)
        first_token, first_out = token_tile * TOKEN_BLOCK, out_tile * OUT_BLOCK
        product = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], dtype=tl.float32)
        up = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], dtype=tl.float32)
        for start in range(0, IN, IN_BLOCK):
            x = x_tiles.load([first_token, start])
            product = multiply(x, w_tiles.load([first_out, start]).T, product)
            if GATED:
                up = multiply(x, w_tiles.load([OUT + first_out, start]).T, up)
        # In halves: the addresses of a whole tile and its sums do not fit in registers together.
        HALF: tl.constexpr = OUT_BLOCK // 2
        left, right = _halves(product)
        up_left, up_right = _halves(up)
        # The adapters' sums for a half of the widest tile do not fit together with the other half.
        PIECE: tl.constexpr = HALF if delta_ptr is None else min(HALF, 64)
        token, out = tl.arange(0, TOKEN_BLOCK)[:, None], tl.arange(0, PIECE)[None, :]
        for place in tl.static_range(OUT_BLOCK // PIECE):
            sums, up_sums = left if place * PIECE < HALF else right, up_left if place * PIECE < HALF else up_right
            if PIECE < HALF:
                first, second = _halves(sums)
                up_first, up_second = _halves(up_sums)
                sums, up_sums = first if place % 2 == 0 else second, up_first if place % 2 == 0 else up_second
            store_product(
                sums, up_sums,
                first_token.to(tl.int64), first_out.to(tl.int64) + place * PIECE, token, out, tokens,
                bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
                y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
            )  # fmt: skip


@triton.jit
def _halves(tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of a tile's columns."""
    columns: tl.constexpr = tile.shape[1] // 2
    left, right = tile.reshape(tile.shape[0], 2, columns).permute(0, 2, 1).split()
    return left, right


persistent_budget = Budget("persistent_kernel")
