"""Matrix products of many tokens: y = x·Wᵀ in tiles on the matrix units, loaded through pointers; for every GPU.

Bound by arithmetic, 2·T·IN·OUT operations. A program computes one tile of y. Programs that run at the same time lie in
groups of GROUP tiles of tokens, so that they share what they read of W in the L2 cache.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.operand_tiles import multiply, read_tile
from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.machine_code.budget import Budget


@triton.jit
def tile_kernel(
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
) -> None:
    """One tile [TOKEN_BLOCK, OUT_BLOCK] of y a program; gated, the same tile of gate and of up."""
    token_tile, out_tile = tile_of(tl.program_id(0), tl.cdiv(tokens, TOKEN_BLOCK), tl.cdiv(OUT, OUT_BLOCK), GROUP)
    first_token, first_out = token_tile.to(tl.int64) * TOKEN_BLOCK, out_tile.to(tl.int64) * OUT_BLOCK
    token, out = tl.arange(0, TOKEN_BLOCK), tl.arange(0, OUT_BLOCK)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    x_row = x_ptr + tl.minimum(first_token + token, tokens - 1)[:, None] * x_row_stride
    weight_row = weight_ptr + tl.minimum(first_out + out, OUT - 1)[None, :] * IN
    part = tl.arange(0, IN_BLOCK)
    MASKED: tl.constexpr = IN % IN_BLOCK != 0
    product = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], dtype=tl.float32)
    up = tl.zeros([TOKEN_BLOCK, OUT_BLOCK], dtype=tl.float32)
    for start in range(0, IN, IN_BLOCK):
        channel = start + part
        x = read_tile(x_row + channel[None, :], (channel < IN)[None, :], MASKED)
        w = read_tile(weight_row + channel[:, None], (channel < IN)[:, None], MASKED)
        product = multiply(x, w, product)
        if GATED:
            w = read_tile(weight_row + OUT * IN + channel[:, None], (channel < IN)[:, None], MASKED)
            up = multiply(x, w, up)
    store_product(
        product, up, first_token, first_out, token[:, None], out[None, :], tokens,
        bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
        y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def tile_of(
    number: tl.tensor, token_tiles: tl.tensor, out_tiles: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(token tile, out tile) of the number-th tile: down GROUP token tiles, then on to the next out tile."""
    in_group = GROUP * out_tiles
    first = number // in_group * GROUP
    height = tl.minimum(token_tiles - first, GROUP)
    return first + number % in_group % height, number % in_group // height


tile_budget = Budget("tile_kernel")
