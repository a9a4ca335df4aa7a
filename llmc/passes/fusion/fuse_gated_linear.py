"""Make a gated MLP's two products and its activation one.

    gated_activation(linear(x, gate, b), linear(x, up, c), act)  ->  gated_linear(x, [gate; up], [b; c], act)
    gated_activation(y[:, :n], y[:, n:], act), y = linear(x, w)  ->  gated_linear(x, w, bias, act)
Must have: both products of the same x, with a bias or both without, used for nothing else; weights of one dtype and
shape used nowhere else; halves of one product in the order gate, up.
Numerics: reorder, since gate and up are not rounded in between. Saves writing and reading 2·n channels a token.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.fusion.merged_weight import cannot_stack, stack_rows
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_LINEAR = torch.ops.llmc.linear.default
_SPLITS = (torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor)


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Try every gated activation, in order."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.gated_activation.default):
        gate, up, activation = (call_arguments(node)[n] for n in ("gate", "up", "activation"))
        whole = _whole_of(gate, up)
        refusal = _cannot_fuse_two(graph, gate, up) if whole is None else _cannot_fuse_halves(whole, gate, up)
        if refusal is not None:
            log.refuse(refusal)
            continue
        products = (gate, up) if whole is None else (whole,)
        log.step(" + ".join(n.name for n in (*products, node)), node, *products)
        x, weight, bias = _stacked(graph, gate, up) if whole is None else _linear_arguments(whole)
        with graph.graph.inserting_before(node):
            fused = graph.graph.call_function(torch.ops.llmc.gated_linear.default, (x, weight, bias, activation))
        node.replace_all_uses_with(fused)


fuse_gated_linear = GraphPass("fuse_gated_linear", run, Numerics.REORDER, Stage.OPTIMIZED)


def _cannot_fuse_two(graph: ModelGraph, gate: fx.Node, up: fx.Node) -> Refusal | None:
    for name, node in (("gate", gate), ("up", up)):
        if node.target is not _LINEAR:
            return Refusal(f"{name} is {node.name}, a {node.target} and no llmc.linear", node)
    (x, gate_weight, gate_bias), (other, up_weight, up_bias) = _linear_arguments(gate), _linear_arguments(up)
    if x is not other:
        return Refusal(f"gate is a product of {x.name}, up of {other.name}", up)
    if (gate_bias is None) != (up_bias is None):
        return Refusal(f"gate has the bias {gate_bias}, up {up_bias}", up)
    refusal = _used_elsewhere(gate) or _used_elsewhere(up)
    refusal = refusal or cannot_stack(graph, [(gate_weight, gate), (up_weight, up)])
    if refusal is None and gate_bias is not None and up_bias is not None:
        refusal = cannot_stack(graph, [(gate_bias, gate), (up_bias, up)])
    return refusal


def _stacked(graph: ModelGraph, gate: fx.Node, up: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """x, weight and bias of both products as one."""
    (x, gate_weight, gate_bias), (_, up_weight, up_bias) = _linear_arguments(gate), _linear_arguments(up)
    weight = stack_rows(graph, (gate_weight, up_weight))
    if gate_bias is None or up_bias is None:
        return x, weight, None
    return x, weight, stack_rows(graph, (gate_bias, up_bias))


def _whole_of(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The product that gate and up are both parts of."""
    first, second = _source(gate), _source(up)
    return first if first is not None and first is second and first.target is _LINEAR else None


def _source(part: fx.Node) -> fx.Node | None:
    if part.target is torch.ops.aten.slice.Tensor:
        return part.all_input_nodes[0]
    if part.target is getitem and part.all_input_nodes[0].target in _SPLITS:
        return part.all_input_nodes[0].all_input_nodes[0]
    return None


def _cannot_fuse_halves(whole: fx.Node, gate: fx.Node, up: fx.Node) -> Refusal | None:
    width = whole.meta["val"].shape[-1]
    seen = [_columns(n, width) for n in (gate, up)]
    if seen != [(0, width // 2), (width // 2, width)]:
        return Refusal(f"gate is columns {seen[0]} of {width} and up {seen[1]}, not the two halves in order", whole)
    return _used_elsewhere(gate) or _used_elsewhere(up) or _parts_used_elsewhere(whole, gate, up)


def _parts_used_elsewhere(whole: fx.Node, gate: fx.Node, up: fx.Node) -> Refusal | None:
    parts = {gate, up, *gate.all_input_nodes, *up.all_input_nodes} - {whole}
    others = [u.name for n in (whole, *parts - {gate, up}) for u in n.users if u not in parts]
    return Refusal(f"{whole.name} is also used by {', '.join(others)}", whole) if others else None


def _columns(part: fx.Node, width: int) -> tuple[int, int] | None:
    """The range of the last axis that a slice or an element of a split is; None if it is of another axis."""
    arguments = call_arguments(part if part.target is torch.ops.aten.slice.Tensor else part.all_input_nodes[0])
    if arguments["dim"] not in (-1, 1):
        return None
    if part.target is torch.ops.aten.slice.Tensor:
        if arguments["step"] != 1:
            return None
        return _clipped(arguments["start"] or 0, width), _clipped(arguments["end"], width)
    index = part.args[1]
    assert isinstance(index, int)
    sizes = arguments.get("split_sizes") or [arguments["split_size"]] * -(-width // arguments["split_size"])
    return sum(sizes[:index]), min(sum(sizes[: index + 1]), width)


def _clipped(bound: int | None, width: int) -> int:
    if bound is None:
        return width
    return min(bound + width if bound < 0 else bound, width)


def _linear_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    arguments = call_arguments(node)
    return arguments["x"], arguments["weight"], arguments["bias"]


def _used_elsewhere(node: fx.Node) -> Refusal | None:
    if len(node.users) == 1:
        return None
    return Refusal(f"{node.name} has {len(node.users)} users: {', '.join(u.name for u in node.users)}", node)
