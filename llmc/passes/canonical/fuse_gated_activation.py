"""Fuse activation(gate) · up into llmc.gated_activation, and activations that are written out into one op.

    x · sigmoid(x)                                          →  aten.silu(x)
    0.5·x · (1 + tanh(√(2/π) · (x + 0.044715·x³)))           →  aten.gelu(x, approximate="tanh")
    silu(gate) · up, and so gelu, relu, sigmoid             →  llmc.gated_activation(gate, up, name)
Must have: gate and up of one shape and dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.match import Match
from llmc.passes.node_rules import Call, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics, Rewrite
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_value, tensor_of

aten = torch.ops.aten


def sigmoid_product(x: Any) -> Any:
    """SiLU from its definition."""
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


def tanh_gelu(x: Any, cube: Any, root: Any) -> Any:
    """GPT-2's GELU: the product's halves in the order of transformers' NewGELUActivation."""
    inner = aten.add.Tensor(x, aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3), cube))
    tanh = aten.tanh.default(aten.mul.Tensor(inner, root))
    return aten.mul.Tensor(aten.mul.Tensor(x, 0.5), aten.add.Tensor(tanh, 1.0))


def tanh_gelu_constant_first(x: Any, cube: Any, root: Any) -> Any:
    """The same as 0.5 · x · (…) parses where x is multiplied last."""
    inner = aten.add.Tensor(x, aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3), cube))
    tanh = aten.tanh.default(aten.mul.Tensor(inner, root))
    return aten.mul.Tensor(aten.mul.Tensor(aten.add.Tensor(tanh, 1.0), 0.5), x)


def _has_gelu_constants(match: Match) -> Refusal | None:
    wanted = {"cube": 0.044715, "root": math.sqrt(2 / math.pi)}
    for name, value in wanted.items():
        seen = match.bound[name]
        if not isinstance(seen, float) or not math.isclose(seen, value, rel_tol=1e-6):
            return Refusal(f"the {name} factor of this GELU is {seen}, expected {value}", match.root)
    return None


def _silu(x: Any) -> Any:
    return aten.silu.default(x)


def _tanh_gelu(x: Any) -> Any:
    return aten.gelu.default(x, approximate="tanh")


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    apply_rules(graph, {aten.mul.Tensor: _gated}, log)


def _gated(node: fx.Node) -> Call | Refusal | None:
    for gated, up in (node.args[:2], node.args[1::-1]):
        name = _activation(gated)
        if name is None or not isinstance(gated, fx.Node):
            continue
        gate = gated.args[0]
        extra = next((u for u in gated.users if u is not node), None)
        if extra is not None:
            return Refusal(f"{gated.name} is also used by {extra.name}", gated)
        if not same_value(tensor_of(gate), tensor_of(up)):
            seen = [describe(n.meta["val"]) if isinstance(n, fx.Node) else repr(n) for n in (gate, up)]
            return Refusal(f"the gate is {seen[0]}, what it multiplies is {seen[1]}", node)
        return Call(torch.ops.llmc.gated_activation.default, (gate, up, name))
    return None


def _activation(node: Any) -> str | None:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target is aten.gelu.default:
        return "gelu_tanh" if call_arguments(node)["approximate"] == "tanh" else "gelu"
    return _NAMES.get(node.target)


_NAMES: dict[Any, str] = {aten.relu.default: "relu", aten.sigmoid.default: "sigmoid", aten.silu.default: "silu"}

fuse_silu = Rewrite("fuse_silu", (sigmoid_product,), _silu, None, Numerics.REORDER, Stage.CAPTURED)
fuse_tanh_gelu = Rewrite(
    "fuse_tanh_gelu",
    (tanh_gelu, tanh_gelu_constant_first),
    _tanh_gelu,
    _has_gelu_constants,
    Numerics.REORDER,
    Stage.CAPTURED,
)
fuse_gated_activation = GraphPass("fuse_gated_activation", _run, Numerics.REORDER, Stage.CAPTURED)
