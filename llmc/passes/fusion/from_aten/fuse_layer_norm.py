"""Fuse LayerNorm into one node, also where it is written out.

    aten.layer_norm(x, [channels], weight, bias, eps)               →  llmc.layer_norm(x, weight, bias, eps)
    to(weight · (x - mean) · rsqrt(mean((x - mean)²) + eps), dtype)  →  the same with bias None (cohere)
    (x - mean) / sqrt(var(x) + eps) · weight + bias                 →  the same
Must have: the result in x's dtype; weight and bias of one axis, with the length of the normalized one; a constant eps;
what normalizes x used only by norms of x.
"""

from typing import Any

import torch
from torch import fx

from llmc.passes.fusion.from_aten.norm_rewrite import norm_rewrite
from llmc.passes.pattern import either

aten = torch.ops.aten


def aten_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any, cudnn: Any) -> Any:
    """torch.nn.functional.layer_norm."""
    return aten.layer_norm.default(x, shape, weight, bias, eps, cudnn)


def weight_and_bias(x: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    """Match a layer norm in single ops, with weight and bias."""
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
    # Both may occur once or twice, because merge_duplicates need not have run.
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


def _replacement(x: fx.Proxy, weight: fx.Proxy | None, bias: fx.Proxy | None, eps: float) -> Any:
    return torch.ops.llmc.layer_norm.default(x, weight, bias, eps)


# From the largest to the smallest, since each form holds the next one inside.
fuse_layer_norm = norm_rewrite("fuse_layer_norm", _replacement, aten_layer_norm, weight_and_bias)
fuse_layer_norm_without_bias = norm_rewrite("fuse_layer_norm_without_bias", _replacement, weight_alone)
fuse_layer_norm_without_weight = norm_rewrite("fuse_layer_norm_without_weight", _replacement, neither)
# llmc.layer_norm computes in fp32 whatever x is.
fuse_layer_norm_casts = norm_rewrite("fuse_layer_norm_casts", _replacement, in_fp32)
