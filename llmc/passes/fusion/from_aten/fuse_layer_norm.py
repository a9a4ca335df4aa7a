"""Fuse LayerNorm into one node, also where it is written out.

    aten.layer_norm(x, [channels], weight, bias, eps)               →  llmc.layer_norm(x, weight, bias, eps)
    to(weight · (x - mean) · rsqrt(mean((x - mean)²) + eps), dtype)  →  the same with bias None (cohere)
    (x - mean) / sqrt(var(x) + eps) · weight + bias                 →  the same
Must have: the result in x's dtype; weight and bias of one axis, with the length of the normalized one; a constant eps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.pattern import either
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.shapes import tensor_of

aten = torch.ops.aten


def aten_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any, cudnn: Any) -> Any:
    """torch.nn.functional.layer_norm."""
    return aten.layer_norm.default(x, shape, weight, bias, eps, cudnn)


def weight_and_bias(x: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    """Written out with both."""
    return _cast_or_not(aten.add.Tensor(aten.mul.Tensor(weight, _normalized(x, eps)), bias), dtype)


def weight_alone(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    """Cohere's."""
    return _cast_or_not(aten.mul.Tensor(weight, _normalized(x, eps)), dtype)


def neither(x: Any, eps: Any, dtype: Any) -> Any:
    """OLMo's."""
    return _cast_or_not(_normalized(x, eps), dtype)


def in_fp32(x: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    """The op between casts."""
    wide = aten._to_copy.default(x, dtype=torch.float32)
    return aten._to_copy.default(torch.ops.llmc.layer_norm.default(wide, weight, bias, eps), dtype=dtype)


def _normalized(x: Any, eps: Any) -> Any:
    y = aten._to_copy.default(x, dtype=torch.float32)
    # Both may stand there once or twice: merge_duplicates need not have run.
    centred, again = (aten.sub.Tensor(y, aten.mean.dim(y, [-1], True)) for _ in range(2))
    variance = either(
        aten.mean.dim(aten.pow.Tensor_Scalar(again, 2), [-1], True),
        aten.var.correction(y, [-1], correction=0, keepdim=True),
    )
    total = aten.add.Tensor(variance, eps)
    return either(
        aten.mul.Tensor(centred, aten.rsqrt.default(total)), aten.div.Tensor(centred, aten.sqrt.default(total))
    )


def _cast_or_not(y: Any, dtype: Any) -> Any:
    return either(y, aten._to_copy.default(y, dtype=dtype))


def _precondition(match: Match) -> None:
    x, result = match.tensor("x"), match.root.meta["val"]
    if result.dtype is not x.dtype:
        raise Refused(f"the norm returns {result.dtype} but its input is {x.dtype}", match.root)
    if not isinstance(match.bound["eps"], float | int):
        raise Refused(f"eps is {match.bound['eps']}, expected a constant", match.root)
    shape = match.bound.get("shape")
    if shape is not None and len(shape) != 1:
        raise Refused(f"the norm is over the last {len(shape)} axes {list(shape)}, expected one", match.root)
    for name in ("weight", "bias"):
        bound = match.bound.get(name)
        found = tensor_of(bound)
        if bound is not None and (found is None or list(found.shape) != [x.shape[-1]]):
            seen = bound if found is None else list(found.shape)
            raise Refused(f"the {name} is {seen}, expected [{x.shape[-1]}]", match.root)


def _replacement(x: fx.Proxy, weight: fx.Proxy | None, bias: fx.Proxy | None, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, weight, bias, eps)


def _rewrite(name: str, *patterns: Callable[..., Any]) -> Rewrite:
    shapes = {"x": (2, 4), "weight": (4,), "bias": (4,), "shape": [4], "eps": 0.625}
    return Rewrite(name, patterns, _replacement, _precondition, Numerics.REORDER, Stage.CAPTURED, examples=(shapes,))


# From the largest to the smallest, since each form holds the next one inside.
fuse_layer_norm = _rewrite("fuse_layer_norm", aten_layer_norm, weight_and_bias)
fuse_layer_norm_without_bias = _rewrite("fuse_layer_norm_without_bias", weight_alone)
fuse_layer_norm_without_weight = _rewrite("fuse_layer_norm_without_weight", neither)
# llmc.layer_norm computes in fp32 whatever x is.
fuse_layer_norm_casts = _rewrite("fuse_layer_norm_casts", in_fp32)
