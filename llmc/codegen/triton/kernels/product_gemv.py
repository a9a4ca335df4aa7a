"""Matrix products of one to four tokens: y[t] = W·x[t], bound by reading W once.

Moves IN·OUT elements of W; x stays in the L1 cache. A program computes OUT_BLOCK outputs of all tokens. Its threads
lie along IN, so that a warp reads 512 neighbouring bytes of a row of W at once, and each keeps its own partial sums:
nothing is exchanged before the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.product_store import store_product


@triton.jit
def gemv_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
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
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKENS tokens. Sums in fp32."""
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKENS
    out, token = tl.arange(0, OUT_BLOCK), tl.arange(0, TOKENS)
    # Rows past the end repeat the last one, so that no load needs a mask for them.
    weight_row = weight_ptr + tl.minimum(first_out + out, OUT - 1)[None, :, None] * IN
    x_row = x_ptr + tl.minimum(first_token + token, tokens - 1)[:, None, None] * x_row_stride
    channel = tl.arange(0, IN_BLOCK)[None, None, :]
    product = tl.zeros([TOKENS, OUT_BLOCK, IN_BLOCK], dtype=tl.float32)
    up = tl.zeros([TOKENS, OUT_BLOCK, IN_BLOCK], dtype=tl.float32)
    for start in range(0, IN, IN_BLOCK):
        if IN % IN_BLOCK == 0:
            x = tl.load(x_row + start + channel).to(tl.float32)
            w = tl.load(weight_row + start + channel).to(tl.float32)
        else:
            x = tl.load(x_row + start + channel, mask=start + channel < IN, other=0.0).to(tl.float32)
            w = tl.load(weight_row + start + channel, mask=start + channel < IN, other=0.0).to(tl.float32)
        product += x * w
        if GATED:
            up_row = weight_row + OUT * IN
            if IN % IN_BLOCK == 0:
                w = tl.load(up_row + start + channel).to(tl.float32)
            else:
                w = tl.load(up_row + start + channel, mask=start + channel < IN, other=0.0).to(tl.float32)
            up += x * w
    store_product(
        tl.sum(product, axis=2),
        tl.sum(up, axis=2),
        first_token,
        first_out,
        token[:, None],
        out[None, :],
        tokens,
        bias_ptr,
        residual_ptr,
        residual_row_stride,
        y_ptr,
        y_row_stride,
        scale,
        OUT,
        GATED,
        ACTIVATION,
    )
