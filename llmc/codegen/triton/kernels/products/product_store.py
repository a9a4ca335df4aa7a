"""The end of every matrix product: bias, what adapters add, activation or gate, scale and residual in fp32, rounded
once at the store. Where programs share a tile, each storing the sums over its part of the channels, the last one adds
them up and does that.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.activation import activate
from llmc.codegen.triton.kernels.last_program import is_last


@triton.jit
def store_product(
    product: tl.tensor,
    up: tl.tensor,
    first_token: tl.tensor,
    first_out: tl.tensor,
    token: tl.tensor,
    out: tl.tensor,
    tokens: int,
    bias_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_row_stride: int,
    adapters_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    scale: float,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """y[token, out] = activation(product + bias)·scale + residual, gated: activation(product + bias)·(up + bias).

    Tokens whose adapters[token] is not 0 have delta, [T, OUT or 2·OUT] in fp32, added before the activation; that of
    others is not read. product, up: a tile of sums. first_token, first_out: where the tile starts, int64. token, out:
    coordinates in the tile, int32 to save registers, one of them [n, 1] and the other [1, n].
    """
    is_out = out < OUT - first_out
    inside = (token < tokens - first_token) & is_out
    if bias_ptr is not None:
        product += tl.load(bias_ptr + first_out + out, mask=is_out, other=0.0)
        if GATED:
            up += tl.load(bias_ptr + OUT + first_out + out, mask=is_out, other=0.0)
    if delta_ptr is not None:
        has = tl.load(adapters_ptr + first_token + token, mask=token < tokens - first_token, other=0) != 0
        delta = delta_ptr + first_token * delta_row_stride + first_out + (token * delta_row_stride + out)
        product = tl.where(has, product + tl.load(delta, mask=inside & has, other=0.0), product)
        if GATED:
            up = tl.where(has, up + tl.load(delta + OUT, mask=inside & has, other=0.0), up)
    y = activate(product, ACTIVATION)
    y = y * up if GATED else y * scale
    if residual_ptr is not None:
        residual_ptr += first_token * residual_row_stride + first_out
        y += tl.load(residual_ptr + (token * residual_row_stride + out), mask=inside, other=0.0).to(tl.float32)
    y_ptr += first_token * y_row_stride + first_out
    tl.store(y_ptr + (token * y_row_stride + out), y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_split_product(
    product: tl.tensor,
    up: tl.tensor,
    split: tl.tensor,
    tile: tl.tensor,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    first_token: tl.tensor,
    first_out: tl.tensor,
    token: tl.tensor,
    out: tl.tensor,
    tokens: int,
    bias_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_row_stride: int,
    adapters_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: int,
    y_ptr: tl.tensor,
    y_row_stride: int,
    scale: float,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """store_product of the sums of SPLITS programs, added up in their order by the last of them.

    split: which of them this is. tile: the number of the tile, which has its own counter. partials: [T, SPLITS, OUT or
    2·OUT], fp32.
    """
    WIDTH: tl.constexpr = 2 * OUT if GATED else OUT
    inside = (token < tokens - first_token) & (out < OUT - first_out)
    partial = partials_ptr + first_token * (SPLITS * WIDTH) + first_out + (token * (SPLITS * WIDTH) + out)
    tl.store(partial + split * WIDTH, product, mask=inside)
    if GATED:
        tl.store(partial + split * WIDTH + OUT, up, mask=inside)
    if is_last(arrivals_ptr, tile, SPLITS):
        sums, up_sums = tl.zeros_like(product), tl.zeros_like(up)
        for part in tl.static_range(SPLITS):
            sums += tl.load(partial + part * WIDTH, mask=inside, other=0.0)
            if GATED:
                up_sums += tl.load(partial + part * WIDTH + OUT, mask=inside, other=0.0)
        store_product(
            sums, up_sums, first_token, first_out, token, out, tokens,
            bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
            y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
        )  # fmt: skip
