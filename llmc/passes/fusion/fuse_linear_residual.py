"""Add the residual stream where the product before it is still in registers.

    add(linear(x, w, b), r)             ->  fused_linear(x, w, b, r, "identity", 1.0)
    add(mul(linear(x, w, b), s), r)     ->  fused_linear(x, w, b, r, "identity", s)           (Granite)
    add(fused_linear₂(…, linear₁), r)   ->  fused_linear₂ with residual fused_linear₁ with r  (parallel blocks)
also with fused_linear that has no residual yet in the place of linear.
Must have: the product and its multiple are used by the sum only; r has the sum's shape and dtype.
Runs before fuse_add_norm and takes every sum it can: the product's epilogue reads r and writes the sum (2 tensors),
the norm after it reads and writes one each: 4 in total. With add_rms_norm it would be 5, because the product writes a
tensor that add_rms_norm reads back. Sums of two operands that are not products are left to add_rms_norm.
Numerics: reorder, since the product is not rounded before the sum, and the third form sums in another order.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refused
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.pattern import either
from llmc.passes.rewrite import Numerics, Rewrite

aten = torch.ops.aten
_linear = torch.ops.llmc.linear.default
_fused = torch.ops.llmc.fused_linear.default


def product_and_residual(
    x: Any, weight: Any, bias: Any, activation: Any, scale: Any, factor: float, residual: Any
) -> Any:
    """A product that only the sum uses."""
    return aten.add.Tensor(residual, _product(x, weight, bias, activation, scale, factor))


def two_products_and_residual(
    x: Any,
    weight: Any,
    bias: Any,
    activation: Any,
    scale: Any,
    first_x: Any,
    first_weight: Any,
    first_bias: Any,
    first_activation: Any,
    first_scale: Any,
    first_factor: float,
    residual: Any,
) -> Any:
    """A product that was added to another one before the residual is."""
    first = _product(first_x, first_weight, first_bias, first_activation, first_scale, first_factor)
    return aten.add.Tensor(residual, _fused(x, weight, bias, first, activation, scale))


def _product(x: Any, weight: Any, bias: Any, activation: Any, scale: Any, factor: Any) -> Any:
    y = either(_linear(x, weight, bias), _fused(x, weight, bias, None, activation, scale))
    return either(aten.mul.Tensor(y, factor), y)


def replacement(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    scale: float | None,
    factor: float | None,
    first_x: Any,
    first_weight: Any,
    first_bias: Any,
    first_activation: str | None,
    first_scale: float | None,
    first_factor: float | None,
    residual: Any,
) -> Any:
    """The residual is added to the innermost product."""
    if first_x is not None:
        first = (first_x, first_weight, first_bias, residual, first_activation, first_scale, first_factor)
        residual = _with_residual(*first)
    return _with_residual(x, weight, bias, residual, activation, scale, factor)


def _with_residual(
    x: Any, weight: Any, bias: Any, residual: Any, activation: str | None, scale: float | None, factor: float | None
) -> Any:
    number = (1.0 if scale is None else scale) * (1.0 if factor is None else factor)
    return _fused(x, weight, bias, residual, activation or "identity", number)


def precondition(match: Match) -> None:
    """Refuse to broadcast."""
    residual = match.bound["residual"]
    if not isinstance(residual, fx.Node):
        raise Refused(f"the product is added to the number {residual}", match.root)
    (product,) = (node for node in match.root.all_input_nodes if node is not residual)
    if render_type(product) != render_type(residual):
        reason = f"the product is {render_type(product)}, what it is added to {render_type(residual)}"
        raise Refused(reason, match.root)


fuse_linear_residual = Rewrite(
    "fuse_linear_residual",
    (product_and_residual, two_products_and_residual),
    replacement,
    precondition,
    numerics=Numerics.REORDER,
    stage=Stage.OPTIMIZED,
    examples=(
        {
            **{"x": (2, 3), "weight": (2, 3), "bias": (2,), "activation": "silu", "scale": 0.5, "factor": 0.625},
            **{"first_x": (2, 3), "first_weight": (2, 3), "first_bias": (2,), "first_activation": "tanh"},
            **{"first_scale": 0.75, "first_factor": 0.375, "residual": (2, 2)},
        },
    ),
)
