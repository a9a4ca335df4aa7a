"""Fuse LayerNorm into one node, also where it is written out.

    aten.layer_norm(x, [channels], weight, bias, eps)               →  llmc.layer_norm(x, weight, bias, eps)
    to(weight · (x - mean) · rsqrt(mean((x - mean)²) + eps), dtype)  →  the same with bias None (cohere)
    (x - mean) / sqrt(var(x) + eps) · weight + bias                 →  the same
Must have: the result in x's dtype; weight and bias of one axis, with the length of the normalized one; a constant eps.
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


def _centred(x: Any) -> Any:
    return aten.sub.Tensor(x, aten.mean.dim(x, [-1], True))


def _mean_of_squares(x: Any) -> Any:
    return aten.mean.dim(aten.pow.Tensor_Scalar(_centred(x), 2), [-1], True)


def _variance(x: Any) -> Any:
    return aten.var.correction(x, [-1], correction=0, keepdim=True)


def _rsqrt(centred: Any, variance: Any) -> Any:
    return aten.mul.Tensor(centred, aten.rsqrt.default(variance))


def _sqrt(centred: Any, variance: Any) -> Any:
    return aten.div.Tensor(centred, aten.sqrt.default(variance))


_FORMS = tuple(product((_mean_of_squares, _variance), (_rsqrt, _sqrt)))


def _normalized(x: Any, eps: Any, variance: Pattern, scaled: Pattern) -> Any:
    y = aten._to_copy.default(x, dtype=torch.float32)
    return scaled(_centred(y), aten.add.Tensor(variance(y), eps))


def _with_weight_and_bias(variance: Pattern, scaled: Pattern) -> Pattern:
    def weight_and_bias(x: Any, weight: Any, bias: Any, eps: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(weight, _normalized(x, eps, variance, scaled)), bias)

    return weight_and_bias


def _with_weight(variance: Pattern, scaled: Pattern) -> Pattern:
    def weight_alone(x: Any, weight: Any, eps: Any) -> Any:
        return aten.mul.Tensor(weight, _normalized(x, eps, variance, scaled))

    return weight_alone


def _without_weight(variance: Pattern, scaled: Pattern) -> Pattern:
    def normalize(x: Any, eps: Any) -> Any:
        return _normalized(x, eps, variance, scaled)

    return normalize


def _then_cast(inner: Pattern, names: tuple[str, ...]) -> Pattern:
    """The pattern with its result cast back to the model's dtype."""
    if "bias" in names:

        def cast_weight_and_bias(x: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
            return aten._to_copy.default(inner(x, weight, bias, eps), dtype=dtype)

        return cast_weight_and_bias
    if "weight" in names:

        def cast_weight(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
            return aten._to_copy.default(inner(x, weight, eps), dtype=dtype)

        return cast_weight

    def cast_normalized(x: Any, eps: Any, dtype: Any) -> Any:
        return aten._to_copy.default(inner(x, eps), dtype=dtype)

    return cast_normalized


def _both(make: Callable[[Pattern, Pattern], Pattern], names: tuple[str, ...]) -> tuple[Pattern, ...]:
    plain = tuple(make(*form) for form in _FORMS)
    return (*plain, *(_then_cast(p, names) for p in plain))


def aten_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any, cudnn: Any) -> Any:
    """torch.nn.functional.layer_norm."""
    return aten.layer_norm.default(x, shape, weight, bias, eps, cudnn)


def _precondition(match: Match) -> Refusal | None:
    x, result = match.tensor("x"), match.root.meta["val"]
    if result.dtype is not x.dtype:
        return Refusal(f"the norm returns {result.dtype} but its input is {x.dtype}", match.root)
    if not isinstance(match.bound["eps"], float | int):
        return Refusal(f"eps is {match.bound['eps']}, expected a constant", match.root)
    shape = match.bound.get("shape")
    if shape is not None and len(shape) != 1:
        return Refusal(f"the norm is over the last {len(shape)} axes {list(shape)}, expected one", match.root)
    for name in ("weight", "bias"):
        bound = match.bound.get(name)
        found = tensor_of(bound)
        if bound is not None and (found is None or list(found.shape) != [x.shape[-1]]):
            seen = bound if found is None else list(found.shape)
            return Refusal(f"the {name} is {seen}, expected [{x.shape[-1]}]", match.root)
    return None


def _layer_norm_in_fp32(x: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    return aten._to_copy.default(torch.ops.llmc.layer_norm.default(wide, weight, bias, eps), dtype=dtype)


def _full(x: fx.Proxy, weight: fx.Proxy | None, bias: fx.Proxy | None, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, weight, bias, eps)


def _weighted(x: fx.Proxy, weight: fx.Proxy, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, weight, None, eps)


def _plain(x: fx.Proxy, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, None, None, eps)


def _rewrite(name: str, patterns: tuple[Pattern, ...], replacement: Pattern) -> Rewrite:
    return Rewrite(name, patterns, replacement, _precondition, Numerics.REORDER, Stage.CAPTURED)


_FULL_PATTERNS = (aten_layer_norm, *_both(_with_weight_and_bias, ("weight", "bias")))
fuse_layer_norm = _rewrite("fuse_layer_norm", _FULL_PATTERNS, _full)
# From the largest to the smallest, since each form holds the next one inside.
fuse_layer_norm_without_bias = _rewrite("fuse_layer_norm_without_bias", _both(_with_weight, ("weight",)), _weighted)
fuse_layer_norm_without_weight = _rewrite("fuse_layer_norm_without_weight", _both(_without_weight, ()), _plain)
# llmc.layer_norm computes in fp32 whatever x is.
fuse_layer_norm_casts = _rewrite("fuse_layer_norm_casts", (_layer_norm_in_fp32,), _full)
