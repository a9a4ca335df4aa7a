"""Fuse activation(gate) · up into llmc.gated_activation, and activations that are written out into one op.

    x · sigmoid(x)                                          →  aten.silu(x)
    0.5·x · (1 + tanh(√(2/π) · (x + 0.044715·x³)))           →  aten.gelu(x, approximate="tanh")
    silu(gate) · up, and so gelu, relu, sigmoid             →  llmc.gated_activation(gate, up, name)
Must have: gate and up of one shape and dtype.
"""

import math
from typing import Any

import torch
from torch import fx

from llmc.graph.fake_value import describe
from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match
from llmc.passes.pattern import either
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.shapes import same_value, tensor_of

aten = torch.ops.aten


def sigmoid_product(x: Any) -> Any:
    """SiLU from its definition."""
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


def tanh_gelu(x: Any, cube: Any, root: Any) -> Any:
    """GPT-2's GELU: the product's halves in the order of transformers' NewGELUActivation, or x multiplied last."""
    inner = aten.add.Tensor(x, aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3), cube))
    opened = aten.add.Tensor(aten.tanh.default(aten.mul.Tensor(inner, root)), 1.0)
    x_first = aten.mul.Tensor(aten.mul.Tensor(x, 0.5), opened)
    return either(x_first, aten.mul.Tensor(aten.mul.Tensor(opened, 0.5), x))


def _has_gelu_constants(match: Match) -> None:
    wanted = {"cube": 0.044715, "root": math.sqrt(2 / math.pi)}
    for name, value in wanted.items():
        seen = match.bound[name]
        if not isinstance(seen, float) or not math.isclose(seen, value, rel_tol=1e-6):
            raise Refused(f"the {name} factor of this GELU is {seen}, expected {value}", match.root)


def _silu(x: Any) -> Any:
    return aten.silu.default(x)


def _tanh_gelu(x: Any) -> Any:
    return aten.gelu.default(x, approximate="tanh")


def activated_gate(gate: Any, up: Any, approximate: Any) -> Any:
    """An activation that kernels know, times what it gates."""
    activated = either(
        aten.relu.default(gate),
        aten.sigmoid.default(gate),
        aten.silu.default(gate),
        aten.gelu.default(gate, approximate=approximate),
    )
    return aten.mul.Tensor(activated, up)


def _same_type(match: Match) -> None:
    gate, up = (match.bound[name] for name in ("gate", "up"))
    if not same_value(tensor_of(gate), tensor_of(up)):
        seen = [describe(n.meta["val"]) if isinstance(n, fx.Node) else repr(n) for n in (gate, up)]
        raise Refused(f"the gate is {seen[0]}, what it multiplies is {seen[1]}", match.root)


def _gated(gate: Any, up: Any, approximate: str | None, match: Match) -> Any:
    (name,) = (_NAMES[node.target] for node in match.nodes[1:])
    return torch.ops.llmc.gated_activation.default(gate, up, "gelu_tanh" if approximate == "tanh" else name)


_NAMES: dict[Any, str] = {
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
}

fuse_silu = Rewrite("fuse_silu", (sigmoid_product,), _silu, None, Numerics.REORDER, Stage.CAPTURED)
fuse_tanh_gelu = Rewrite(
    "fuse_tanh_gelu",
    (tanh_gelu,),
    _tanh_gelu,
    _has_gelu_constants,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=({"cube": 0.044715, "root": math.sqrt(2 / math.pi)},),
)
fuse_gated_activation = Rewrite(
    "fuse_gated_activation",
    (activated_gate,),
    _gated,
    _same_type,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=({"approximate": "none"}, {"approximate": "tanh"}),
)
