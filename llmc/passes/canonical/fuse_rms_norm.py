"""Fuse RMSNorm arithmetic into one node.

    mul(weight, to(mul(to(x, f32), rsqrt(mean(x²) + eps)), dtype))  →  llmc.rms_norm(x, weight, eps)
    to(mul(mul(to(x, f32), rsqrt(mean(x²) + eps)), weight), dtype)  →  the same (gemma: weight is a folded 1 + w)
    aten.rms_norm(x, [channels], weight, eps)                       →  the same
Must have: the result in x's dtype; weight of one axis, with the length of the normalized one; a constant eps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.shapes import tensor_of

aten = torch.ops.aten

Pattern = Callable[..., Any]


def _power(x: Any) -> Any:
    return aten.pow.Tensor_Scalar(x, 2)


def _product(x: Any) -> Any:
    return aten.mul.Tensor(x, x)


def _rsqrt(x: Any, mean_square: Any) -> Any:
    return aten.mul.Tensor(x, aten.rsqrt.default(mean_square))


def _sqrt(x: Any, mean_square: Any) -> Any:
    return aten.div.Tensor(x, aten.sqrt.default(mean_square))


def _inverse_power(x: Any, mean_square: Any) -> Any:
    return aten.mul.Tensor(x, aten.pow.Tensor_Scalar(mean_square, -0.5))


_FORMS = tuple(product((_power, _product), (_rsqrt, _sqrt, _inverse_power)))


def _normalized(x: Any, eps: Any, square: Pattern, scaled: Pattern) -> Any:
    y = aten._to_copy.default(x, dtype=torch.float32)
    return scaled(y, aten.add.Tensor(aten.mean.dim(square(y), [-1], True), eps))


def _weight_last(square: Pattern, scaled: Pattern) -> Pattern:
    def cast_then_weight(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
        return aten.mul.Tensor(weight, aten._to_copy.default(_normalized(x, eps, square, scaled), dtype=dtype))

    return cast_then_weight


def _cast_last(square: Pattern, scaled: Pattern) -> Pattern:
    def weight_then_cast(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
        return aten._to_copy.default(aten.mul.Tensor(weight, _normalized(x, eps, square, scaled)), dtype=dtype)

    return weight_then_cast


def aten_rms_norm(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    """torch.nn.functional.rms_norm."""
    return aten.rms_norm.default(x, shape, weight, eps)


def _without_weight(square: Pattern, scaled: Pattern) -> Pattern:
    def normalize(x: Any, eps: Any) -> Any:
        return _normalized(x, eps, square, scaled)

    return normalize


def _without_weight_cast(square: Pattern, scaled: Pattern) -> Pattern:
    def normalize_then_cast(x: Any, eps: Any, dtype: Any) -> Any:
        return aten._to_copy.default(_normalized(x, eps, square, scaled), dtype=dtype)

    return normalize_then_cast


def _replacement(x: fx.Proxy, weight: fx.Proxy | None, eps: float | None) -> Any:
    number = torch.finfo(x.node.meta["val"].dtype).eps if eps is None else eps
    return torch.ops.llmc.rms_norm.default(x, weight, number)


def _replacement_without_weight(x: fx.Proxy, eps: float) -> Any:
    return torch.ops.llmc.rms_norm.default(x, None, eps)


def _precondition(match: Match) -> Refusal | None:
    x, result = match.tensor("x"), match.root.meta["val"]
    weight, eps, shape = (match.bound.get(name) for name in ("weight", "eps", "shape"))
    if result.dtype is not x.dtype:
        return Refusal(f"the norm returns {result.dtype} but its input is {x.dtype}", match.root)
    if not isinstance(eps, float | int) and not (eps is None and "shape" in match.bound):
        return Refusal(f"eps is {eps}, expected a constant", match.root)
    if shape is not None and len(shape) != 1:
        return Refusal(f"the norm is over the last {len(shape)} axes {list(shape)}, expected one", match.root)
    if weight is not None:
        found = tensor_of(weight)
        if found is None or list(found.shape) != [x.shape[-1]]:
            seen = weight if found is None else list(found.shape)
            return Refusal(f"the weight is {seen}, expected [{x.shape[-1]}]", match.root)
    return None


fuse_rms_norm = Rewrite(
    "fuse_rms_norm",
    patterns=(
        *(make(*form) for make in (_weight_last, _cast_last) for form in _FORMS),
        aten_rms_norm,
    ),
    replacement=_replacement,
    precondition=_precondition,
    numerics=Numerics.REORDER,
    stage=Stage.CAPTURED,
)
# After fuse_rms_norm, since every norm with a weight has one without inside.
fuse_rms_norm_without_weight = Rewrite(
    "fuse_rms_norm_without_weight",
    patterns=tuple(make(*form) for make in (_without_weight, _without_weight_cast) for form in _FORMS),
    replacement=_replacement_without_weight,
    precondition=_precondition,
    numerics=Numerics.REORDER,
    stage=Stage.CAPTURED,
)
