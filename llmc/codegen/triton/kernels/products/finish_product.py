"""Finish a product that a library has computed: the scales of codes, bias, what adapters add, activation or gate, scale
and residual.

Memory-bound: moves T·(OUT or 2·OUT) elements of the product and T·OUT of y.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.product_store import store_product
from llmc.codegen.triton.machine_code.budget import Budget


@triton.jit
def finish_product_kernel(
    product_ptr: tl.tensor,
    product_row_stride: int,
    x_scales_ptr: tl.tensor,
    scales_ptr: tl.tensor,
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
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
) -> None:
    """Program (t, j): token t's j-th OUT_BLOCK outputs.

    x_scales, scales: of a product of codes, a scale for each token and for each row of W.
    """
    first_token, first_out = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * OUT_BLOCK
    out, token = tl.arange(0, OUT_BLOCK)[None, :], tl.arange(0, 1)[:, None]
    source = product_ptr + first_token * product_row_stride + first_out + out
    inside = first_out + out < OUT
    product = tl.load(source, mask=inside, other=0).to(tl.float32)
    up = tl.zeros([1, OUT_BLOCK], dtype=tl.float32)
    if GATED:
        up = tl.load(source + OUT, mask=inside, other=0).to(tl.float32)
    if scales_ptr is not None:
        x_scale = tl.load(x_scales_ptr + first_token)
        product *= tl.load(scales_ptr + first_out + out, mask=inside, other=0.0).to(tl.float32) * x_scale
        if GATED:
            up *= tl.load(scales_ptr + OUT + first_out + out, mask=inside, other=0.0).to(tl.float32) * x_scale
    store_product(
        product, up, first_token, first_out, token, out, tokens,
        bias_ptr, delta_ptr, delta_row_stride, adapters_ptr, residual_ptr, residual_row_stride,
        y_ptr, y_row_stride, scale, OUT, GATED, ACTIVATION,
    )  # fmt: skip


finish_product_budget = Budget("finish_product_kernel")
