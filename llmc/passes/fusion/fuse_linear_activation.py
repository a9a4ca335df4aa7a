"""Apply an activation where the product before it is still in registers.

    act(linear(x, weight, bias))  ->  fused_linear(x, weight, bias, None, "act", 1.0)
One pass for each activation. GELU and SiLU written out are one op since the canonical stage; squared ReLU and the
fast forms of GELU are found here, also where their last product has become a gated_activation.
Must have: the product is used by the activation only.
Numerics: reorder, since the product is not rounded before the activation. Saves writing and reading it once.
Sources: Hendrycks and Gimpel 2016 (GELU and its approximations), So et al. 2021 (squared ReLU).
"""

from collections.abc import Callable
from typing import Any

import torch

from llmc.graph.stage import Stage
from llmc.passes.pattern import either
from llmc.passes.rewrite import Rewrite

aten = torch.ops.aten
_linear = torch.ops.llmc.linear.default
_gated = torch.ops.llmc.gated_activation.default
_fused = torch.ops.llmc.fused_linear.default


def gelu(x: Any, weight: Any, bias: Any, approximate: Any) -> Any:
    """GELU, exact or in torch's tanh approximation."""
    return aten.gelu.default(_linear(x, weight, bias), approximate=approximate)


def fast_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """½·y·(1 + tanh(0.7978845608·y·(1 + 0.044715·y²))), HF's FastGELUActivation."""
    y = _linear(x, weight, bias)
    inner = aten.add.Tensor(aten.mul.Tensor(aten.mul.Tensor(y, 0.044715), y), 1.0)
    tanh = aten.tanh.default(aten.mul.Tensor(aten.mul.Tensor(y, 0.7978845608), inner))
    return aten.mul.Tensor(aten.mul.Tensor(y, 0.5), aten.add.Tensor(tanh, 1.0))


def quick_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """y·sigmoid(1.702·y), HF's QuickGELUActivation."""
    y = _linear(x, weight, bias)
    return aten.mul.Tensor(y, aten.sigmoid.default(aten.mul.Tensor(y, 1.702)))


def quick_gelu_gated(x: Any, weight: Any, bias: Any) -> Any:
    """y·sigmoid(1.702·y), after the last product became a gate."""
    y = _linear(x, weight, bias)
    return _gated(aten.mul.Tensor(y, 1.702), y, "sigmoid")


def relu_squared(x: Any, weight: Any, bias: Any) -> Any:
    """relu(y)², HF's ReLUSquaredActivation, also as relu(y) times itself, and that after its product became a gate."""
    y = _linear(x, weight, bias)
    relu = aten.relu.default(y)
    return either(aten.pow.Tensor_Scalar(relu, 2), aten.mul.Tensor(relu, relu), _gated(y, relu, "relu"))


def _applied(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    def pattern(x: Any, weight: Any, bias: Any) -> Any:
        return activation(_linear(x, weight, bias))

    return pattern


def _replace_gelu(x: Any, weight: Any, bias: Any, approximate: Any) -> Any:
    return _fused(x, weight, bias, None, "gelu_tanh" if approximate == "tanh" else "gelu", 1.0)


def _fuse(name: str, activation: str, *patterns: Callable[..., Any]) -> Rewrite:
    def replacement(x: Any, weight: Any, bias: Any) -> Any:
        return _fused(x, weight, bias, None, activation, 1.0)

    return Rewrite(name, patterns, replacement, stage=Stage.OPTIMIZED)


_GELUS = ({"approximate": "none"}, {"approximate": "tanh"})
# Forms of several ops come before the ops that they contain.
fuse_linear_activation: tuple[Rewrite, ...] = (
    Rewrite("fuse_linear_gelu", (gelu,), _replace_gelu, stage=Stage.OPTIMIZED, examples=_GELUS),
    _fuse("fuse_linear_fast_gelu", "gelu_tanh", fast_gelu),
    _fuse("fuse_linear_quick_gelu", "quick_gelu", quick_gelu, quick_gelu_gated),
    _fuse("fuse_linear_relu_squared", "relu2", relu_squared),
    _fuse("fuse_linear_silu", "silu", _applied(aten.silu.default)),
    _fuse("fuse_linear_relu", "relu", _applied(aten.relu.default)),
    _fuse("fuse_linear_sigmoid", "sigmoid", _applied(aten.sigmoid.default)),
    _fuse("fuse_linear_tanh", "tanh", _applied(aten.tanh.default)),
)
