"""The matrix products: llmc::linear, its fused forms, and llmc::lm_head.

Weights are [out, in] as in torch.nn.Linear. Sums are taken in fp32 and rounded once, at the end: to dtype, or x's where
that is None. How a weight is stored and how x arrives are ops of their own before a product (weight_codes.py,
token_codes.py); where their values are not rounded, in fp32, a product's kernel computes them too.
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.activation import apply_activation
from llmc.ops.registry import FROM_CAPTURED, PRODUCT, WHEN_OPTIMIZED, matrix_product, op, product_result


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor | None = None, adapters: Tensor | None = None
) -> Tensor:
    """The sums, including the contributions of adapters to the rows of their tokens."""
    y = x.float() @ weight.float().t()
    y = y if bias is None else y + bias.float()
    return y if delta is None or adapters is None else torch.where(adapters[:, None] != 0, y + delta, y)


def fits(call: OpCall) -> str | None:
    """Return why x: [..., in] and weight: [out, in] have no product, or None."""
    x, weight = call.shape("x"), call.shape("weight")
    return None if len(weight) == 2 and x[-1] == weight[1] else f"x {x} does not fit weight {weight}"


@op(
    fake=product_result(),
    stages=FROM_CAPTURED,
    flops=matrix_product,
    rows=("x", "delta", "adapters"),
    check=fits,
    takes=PRODUCT,
    axes="x[* i] weight[o i] bias[o] -> [* o]",
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    delta: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """y = x·weightᵀ + bias + delta. x: [..., in]; weight: [out, in]; bias: [out]; returns [..., out].

    delta: [tokens, out], fp32, what llmc::lora says, and read where adapters, [tokens], is not 0.
    """
    return _product(x, weight, bias, delta, adapters).to(dtype or x.dtype)


@op(
    fake=product_result(),
    stages=WHEN_OPTIMIZED,
    flops=matrix_product,
    rows=("x", "residual", "delta", "adapters"),
    check=fits,
    takes=PRODUCT,
)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    scale: float,
    dtype: torch.dtype | None = None,
    delta: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """y = activation(x·weightᵀ + bias + delta)·scale + residual, rounded once. residual: [..., out], of the result's
    dtype; delta, adapters: as linear's.

    activation: a name from llmc.ops.activation, "identity" for none. scale: 1.0 for none (Granite's
    residual multiplier).
    """
    y = apply_activation(_product(x, weight, bias, delta, adapters), activation) * scale
    return (y if residual is None else y + residual.float()).to(dtype or x.dtype)


@op(
    fake=product_result(rows=2),
    stages=WHEN_OPTIMIZED,
    flops=matrix_product,
    rows=("x", "delta", "adapters"),
    check=fits,
    takes=PRODUCT,
)
def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype | None = None,
    delta: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """y = activation(x·gateᵀ)·(x·upᵀ), where weight: [2·out, in] is gate's rows followed by up's.

    bias: [2·out]; delta: [tokens, 2·out], adapters: as linear's, added before the activation; returns [..., out].
    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    gate, up = _product(x, weight, bias, delta, adapters).chunk(2, dim=-1)
    return (apply_activation(gate, activation) * up).to(dtype or x.dtype)


@op(
    fake=product_result(dtype=torch.float32),
    stages=FROM_CAPTURED,
    flops=matrix_product,
    rows=("x",),
    check=fits,
    takes=PRODUCT,
    axes="x[* i] weight[o i] bias[o] -> [* o]",
)
def lm_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits, left in fp32. x: [rows, channels]; weight: [vocabulary, channels], often tied to the embedding."""
    return _product(x, weight, bias)
