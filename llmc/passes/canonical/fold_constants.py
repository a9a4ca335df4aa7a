"""Compute values that depend only on weights once, at build time.

    add(weight, 1.0)  →  a weight placeholder with the recipe add(weight, 1.0)
    a constant tensor of one number, as an operand  →  the number
Must have: no input of the step. The pass only writes a recipe; it is evaluated when the engine is written. Casts to a
wider dtype and expanded axes stay in the graph for matrices, where folding would only make the file bigger.
"""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived, Recipe, identifier, stored_names
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import fake_of, tensor_of

aten = torch.ops.aten

# Maximum growth of a folded tensor over its inputs, and the size in bytes below which growth does not matter.
_GROWTH = 1
_SMALL = 1 << 20


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    folded = {n: graph.weights[n.name] for n in graph.weight_nodes()}
    for node in graph.graph.nodes:
        if node.op == "call_function" and _is_constant(node, folded, log):
            folded[node] = Derived(_target(node), _recipes(node.args, folded), _keywords(node, folded))
    for node, recipe in folded.items():
        weight = node
        if node.op == "call_function" and any(user not in folded for user in node.users):
            log.step(f"{op_name(node.target)} of {', '.join(stored_names(recipe)) or 'constants'}", node)
            weight = new_weight(graph, _name(node, recipe), recipe, node.meta["val"])
            node.replace_all_uses_with(weight)
        number = _number(weight, recipe)
        if number is not None:
            _use_number(weight, number, log)


def _name(node: fx.Node, recipe: Recipe) -> str:
    """model_norm_weight_add for add(model.norm.weight, 1.0)."""
    op = _target(node)._schema.name.split("::")[1].lstrip("_")
    return "_".join([*(identifier(name) for name in stored_names(recipe)[:1]), op])


def _is_constant(node: fx.Node, folded: dict[fx.Node, Recipe], log: RewriteLog) -> bool:
    value = tensor_of(node)
    if value is None or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if any(n not in folded for n in node.all_input_nodes) or any(isinstance(s, torch.SymInt) for s in value.shape):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    size = value.numel() * value.dtype.itemsize
    sources = sum(t.numel() * t.dtype.itemsize for n in node.all_input_nodes if (t := tensor_of(n)) is not None)
    if size > max(_SMALL, _GROWTH * sources):
        log.refuse(Refusal(f"folding makes {size} bytes of weights out of {sources}", node))
        return False
    return True


def _target(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target


def _recipes(value: Any, folded: dict[fx.Node, Recipe]) -> Any:
    if isinstance(value, fx.Node):
        return folded[value]
    if isinstance(value, list | tuple):
        return tuple(_recipes(v, folded) for v in value)
    return value


def _keywords(node: fx.Node, folded: dict[fx.Node, Recipe]) -> tuple[tuple[str, Any], ...]:
    # A device in a recipe would tie the engine to the machine that captured it.
    return tuple((k, _recipes(v, folded)) for k, v in sorted(node.kwargs.items()) if k not in ("device", "pin_memory"))


def _number(weight: fx.Node, recipe: Recipe) -> float | int | bool | None:
    """The value of a constant with one element and no axes; None for a tensor of the checkpoint."""
    if weight.meta["val"].dim() != 0 or stored_names(recipe):
        return None
    if isinstance(recipe, Constant):
        return recipe.value.item()
    is_full = isinstance(recipe, Derived) and recipe.target is aten.full.default
    number: Any = recipe.args[1] if isinstance(recipe, Derived) and is_full else None
    return None if isinstance(number, Recipe) else number


def _use_number(weight: fx.Node, number: float | int | bool, log: RewriteLog) -> None:
    for user in list(weight.users):
        if user.target not in _SCALAR_OPERAND or user.args[1] is not weight or user.args[0] is weight:
            continue
        other, value = fake_of(user.args[0]), fake_of(user)
        if other.dtype is not value.dtype or not value.dtype.is_floating_point:
            continue
        log.step(f"{weight.name} is {number!r} in {user.name}", user)
        user.args = (user.args[0], number, *user.args[2:])


_SCALAR_OPERAND = frozenset({aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor})


def _from_weights(x: Any, weight: Any) -> Any:
    return aten.mul.Tensor(x, aten.add.Tensor(weight, 1.0))


fold_constants = GraphPass(
    "fold_constants",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_from_weights, {"x": ("T", 3), "weight": (3,)}, frozenset({"weight"})),),
)
