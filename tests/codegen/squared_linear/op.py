"""llmc::squared_linear — a product whose sums are squared. Source: So et al. 2021, "Primer"."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.linear import fits
from llmc.ops.registry import FROM_CAPTURED, PRODUCT, matrix_product, op, product_result


@op(
    fake=product_result(),
    stages=FROM_CAPTURED,
    flops=matrix_product,
    rows=("x",),
    check=fits,
    takes=PRODUCT,
)
def squared_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """y = max(x·weightᵀ + bias, 0)², rounded once. x: [..., in]; weight: [out, in]; returns [..., out]."""
    y = x.float() @ weight.float().t()
    y = y if bias is None else y + bias.float()
    return torch.relu(y).square().to(dtype or x.dtype)
