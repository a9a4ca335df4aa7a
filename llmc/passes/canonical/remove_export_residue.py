"""Remove the residue of export: assertions, copies, casts to the same dtype, and views of whole tensors.

    aten.clone(x), aten.alias(x), x.to(x.dtype), x[:], x.expand(x.shape), dropout in eval mode, x · 1  →  x
    aten.view(aten.clone(x), sizes)  →  aten.reshape(x, sizes), since x need not lie as its copy does
    aten.type_as(x, y), aten.to.*(x, dtype)  →  aten._to_copy(x, dtype=dtype)
    aten.cat([x, empty])  →  x;  x.expand(x.shape[0], n)  →  x.expand(-1, n), without arithmetic on sizes
Must have: the same shape and dtype for every token count. Packed-sequence detection, whose result nothing uses once the
attention is known to be causal, falls to dead-code removal.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import dim_of, fake_of, front_dim, same_size, same_value, shape_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    assertions = [n for n in graph.graph.nodes if n.target in _ASSERTIONS]
    if assertions:
        log.step(f"{len(assertions)} assertions of the exported program", *assertions)
        for node in reversed(assertions):
            graph.graph.erase_node(node)
    apply_rules(graph, _RULES, log)


def _same_as_input(node: fx.Node) -> fx.Node | None:
    source = node.all_input_nodes[0]
    return source if same_value(source.meta["val"], node.meta["val"]) else None


def _copy(node: fx.Node) -> fx.Node | None:
    source = _same_as_input(node)
    if source is not None:
        _reshape_views(node)
    return source


def _reshape_views(node: fx.Node) -> None:
    """Replace views of a tensor, and views of those, by reshapes, which take any strides."""
    for user in node.users:
        if user.target in (aten.view.default, aten._unsafe_view.default):
            user.target = aten.reshape.default
            _reshape_views(user)


def _dropout(node: fx.Node) -> fx.Node | None:
    arguments = call_arguments(node)
    return node.all_input_nodes[0] if arguments.get("train") is False or arguments["p"] == 0 else None


def _cast(node: fx.Node) -> fx.Node | Call | None:
    operand = _same_as_input(node)
    if operand is not None:
        return operand
    only_dtype = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}
    return None if only_dtype else Call(aten._to_copy.default, (node.args[0],), {"dtype": fake_of(node).dtype})


def _neutral(neutral: float) -> Rule:
    def rule(node: fx.Node) -> fx.Node | None:
        arguments = call_arguments(node)
        is_neutral = not isinstance(arguments["other"], fx.Node) and arguments["other"] == neutral
        return _same_as_input(node) if is_neutral else None

    return rule


def _transpose(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if dim_of(node, "dim0") == dim_of(node, "dim1") else None


def _permute(node: fx.Node) -> fx.Node | None:
    dims: Any = node.args[1]
    return node.all_input_nodes[0] if [d % len(dims) for d in dims] == [*range(len(dims))] else None


def _expand(node: fx.Node) -> fx.Node | Call | None:
    operand = _same_as_input(node)
    before, after, sizes = shape_of(node.args[0]), shape_of(node), call_arguments(node)["size"]
    if operand is not None or len(before) != len(after):
        return operand
    kept = [-1 if same_size(*pair) else size for size, *pair in zip(sizes, before, after, strict=True)]
    counted = any(isinstance(size, fx.Node) and new == -1 for size, new in zip(sizes, kept, strict=True))
    return Call(aten.expand.default, (node.args[0], kept)) if counted else None


def _cat(node: fx.Node) -> fx.Node | Call | None:
    tensors, value = call_arguments(node)["tensors"], fake_of(node)
    dim = front_dim(call_arguments(node)["dim"], value.dim())
    kept = [t for t in tensors if fake_of(t).dim() != value.dim() or shape_of(t)[dim] != 0]
    if len(kept) == 1:
        return kept[0] if same_value(fake_of(kept[0]), value) else None
    return Call(aten.cat.default, (kept, dim)) if kept and len(kept) < len(tensors) else None


_ASSERTIONS = frozenset(
    {
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten._assert_tensor_metadata.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_RULES: dict[Any, Rule] = {
    aten._to_copy.default: _cast,
    aten._unsafe_view.default: _same_as_input,
    aten.add.Tensor: _neutral(0),
    aten.alias.default: _same_as_input,
    aten.cat.default: _cat,
    aten.clone.default: _copy,
    aten.contiguous.default: _copy,
    aten.detach.default: _same_as_input,
    aten.detach_.default: _same_as_input,
    aten.div.Tensor: _neutral(1),
    aten.dropout.default: _dropout,
    aten.expand.default: _expand,
    aten.lift_fresh.default: _same_as_input,
    aten.lift_fresh_copy.default: _same_as_input,
    aten.mul.Tensor: _neutral(1),
    aten.permute.default: _permute,
    aten.reshape.default: _same_as_input,
    aten.slice.Tensor: _same_as_input,
    aten.squeeze.dim: _same_as_input,
    aten.sub.Tensor: _neutral(0),
    aten.to.device: _cast,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.other: _cast,
    aten.transpose.int: _transpose,
    aten.type_as.default: _cast,
    aten.view.default: _same_as_input,
}


def _residue(x: Any, y: Any) -> tuple[Any, ...]:
    same = aten.slice.Tensor(aten.clone.default(aten.mul.Tensor(aten.add.Tensor(x, 0), 1)), 1, 0, 4)
    dropped = aten.dropout.default(aten.transpose.int(same, 1, 1), 0.1, False)
    whole = aten.cat.default([aten.slice.Tensor(y, 1, 0, 0), aten.permute.default(y, [0, -1])], 1)
    spread = aten.expand.default(whole, [aten.sym_size.int(x, 0), 2])
    return aten.view.default(aten.contiguous.default(dropped), [-1, 2]), aten.type_as.default(y, x), spread


remove_export_residue = GraphPass(
    "remove_export_residue",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_residue, {"x": ("T", 4), "y": ("T", 2)}),),
)
