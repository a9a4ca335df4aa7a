"""Apply an activation where the product before it is still in registers.

    act(linear(x, weight, bias))  ->  fused_linear(x, weight, bias, None, "act", 1.0)
One pass for each activation, by name; GPT-2's tanh approximation of GELU and the sigmoid one of CLIP are also found
written out, as HF does. Must have: the product is used by the activation only.
Numerics: reorder, since the product is not rounded before the activation. Saves writing and reading it once.
Sources: Hendrycks and Gimpel 2016 (GELU and both approximations), So et al. 2021 (squared ReLU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from llmc.graph.stage import Stage
from llmc.passes.rewrite import Rewrite

aten = torch.ops.aten
_linear = torch.ops.llmc.linear.default


def gelu(x: Any, weight: Any, bias: Any) -> Any:
    """Exact GELU."""
    return aten.gelu.default(_linear(x, weight, bias))


def gelu_tanh(x: Any, weight: Any, bias: Any) -> Any:
    """GELU in torch's tanh approximation."""
    return aten.gelu.default(_linear(x, weight, bias), approximate="tanh")


def new_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """½·y·(1 + tanh(√(2/π)·(y + 0.044715·y³))), HF's NewGELUActivation."""
    y = _linear(x, weight, bias)
    inner = aten.add.Tensor(y, aten.mul.Tensor(aten.pow.Tensor_Scalar(y, 3.0), 0.044715))
    tanh = aten.tanh.default(aten.mul.Tensor(inner, math.sqrt(2.0 / math.pi)))
    return aten.mul.Tensor(aten.mul.Tensor(y, 0.5), aten.add.Tensor(tanh, 1.0))


def fast_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """½·y·(1 + tanh(0.7978845608·y·(1 + 0.044715·y²))), HF's FastGELUActivation."""
    y = _linear(x, weight, bias)
    inner = aten.add.Tensor(aten.mul.Tensor(aten.mul.Tensor(y, 0.044715), y), 1.0)
    tanh = aten.tanh.default(aten.mul.Tensor(aten.mul.Tensor(y, 0.7978845608), inner))
    return aten.mul.Tensor(aten.mul.Tensor(y, 0.5), aten.add.Tensor(tanh, 1.0))


def silu(x: Any, weight: Any, bias: Any) -> Any:
    """y·sigmoid(y), torch's own."""
    return aten.silu.default(_linear(x, weight, bias))


def written_out_silu(x: Any, weight: Any, bias: Any) -> Any:
    """y·sigmoid(y), written out."""
    y = _linear(x, weight, bias)
    return aten.mul.Tensor(y, aten.sigmoid.default(y))


def relu(x: Any, weight: Any, bias: Any) -> Any:
    """max(y, 0)."""
    return aten.relu.default(_linear(x, weight, bias))


def relu_power_2(x: Any, weight: Any, bias: Any) -> Any:
    """relu(y)², HF's ReLUSquaredActivation."""
    return aten.pow.Tensor_Scalar(aten.relu.default(_linear(x, weight, bias)), 2)


def relu_times_relu(x: Any, weight: Any, bias: Any) -> Any:
    """relu(y)·relu(y)."""
    y = aten.relu.default(_linear(x, weight, bias))
    return aten.mul.Tensor(y, y)


def quick_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """y·sigmoid(1.702·y), HF's QuickGELUActivation."""
    y = _linear(x, weight, bias)
    return aten.mul.Tensor(y, aten.sigmoid.default(aten.mul.Tensor(y, 1.702)))


def sigmoid(x: Any, weight: Any, bias: Any) -> Any:
    """1 / (1 + exp(-y))."""
    return aten.sigmoid.default(_linear(x, weight, bias))


def tanh(x: Any, weight: Any, bias: Any) -> Any:
    """tanh(y)."""
    return aten.tanh.default(_linear(x, weight, bias))


def _fuse(activation: str, *patterns: Callable[..., Any]) -> Rewrite:
    def replacement(x: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.llmc.fused_linear.default(x, weight, bias, None, activation, 1.0)

    return Rewrite(f"fuse_linear_{activation}", patterns, replacement, stage=Stage.OPTIMIZED)


# Written-out forms come before what they contain.
fuse_linear_activation: tuple[Rewrite, ...] = (
    _fuse("gelu_tanh", gelu_tanh, new_gelu, fast_gelu),
    _fuse("quick_gelu", quick_gelu),
    _fuse("relu2", relu_power_2, relu_times_relu),
    _fuse("gelu", gelu),
    _fuse("silu", silu, written_out_silu),
    _fuse("relu", relu),
    _fuse("sigmoid", sigmoid),
    _fuse("tanh", tanh),
)
