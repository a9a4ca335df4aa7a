"""Fuse RMSNorm arithmetic into one node.

    mul(weight, to(mul(to(x, f32), rsqrt(mean(x²) + eps)), dtype))  →  llmc.rms_norm(x, weight, eps)
    to(mul(mul(to(x, f32), rsqrt(mean(x²) + eps)), weight), dtype)  →  the same (gemma: weight is a folded 1 + w)
    aten.rms_norm(x, [channels], weight, eps)                       →  the same
Must have: the result in x's dtype; weight of one axis, with the length of the normalized one; a constant eps;
what normalizes x used only by norms of x.
"""

from typing import Any

import torch
from torch import fx

from llmc.passes.fusion.from_aten.norm_rewrite import norm_rewrite
from llmc.passes.pattern import either

aten = torch.ops.aten


def cast_then_weight(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    """Match Llama's norm, which is rounded before it is multiplied by the weight."""
    return aten.mul.Tensor(weight, aten._to_copy.default(_normalized(x, eps), dtype=dtype))


def weight_then_cast(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    """Match Gemma's norm, which is rounded once, after the weight."""
    return aten._to_copy.default(aten.mul.Tensor(weight, _normalized(x, eps)), dtype=dtype)


def aten_rms_norm(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    """Match torch.nn.functional.rms_norm."""
    return aten.rms_norm.default(x, shape, weight, eps)


def without_weight(x: Any, eps: Any, dtype: Any) -> Any:
    """Match the norm without a weight."""
    y = _normalized(x, eps)
    return either(y, aten._to_copy.default(y, dtype=dtype))


def _normalized(x: Any, eps: Any) -> Any:
    y = aten._to_copy.default(x, dtype=torch.float32)
    square = either(aten.pow.Tensor_Scalar(y, 2), aten.mul.Tensor(y, y))
    mean_square = aten.add.Tensor(aten.mean.dim(square, [-1], True), eps)
    return either(
        aten.mul.Tensor(y, aten.rsqrt.default(mean_square)),
        aten.div.Tensor(y, aten.sqrt.default(mean_square)),
        aten.mul.Tensor(y, aten.pow.Tensor_Scalar(mean_square, -0.5)),
    )


def _replacement(x: fx.Proxy, weight: fx.Proxy | None, eps: float | None) -> Any:
    number = torch.finfo(x.node.meta["val"].dtype).eps if eps is None else eps
    return torch.ops.llmc.rms_norm.default(x, weight, number)


fuse_rms_norm = norm_rewrite("fuse_rms_norm", _replacement, cast_then_weight, weight_then_cast, aten_rms_norm)
# After fuse_rms_norm, since every norm with a weight has one without inside.
fuse_rms_norm_without_weight = norm_rewrite("fuse_rms_norm_without_weight", _replacement, without_weight)
