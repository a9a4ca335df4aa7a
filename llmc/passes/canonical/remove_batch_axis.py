"""Drop the leading batch axis, which is 1: llmc's graphs are token-major.

    input_ids [1, T]  →  unsqueeze(input_ids [T], 0), and then, node by node towards the logits,
    op(unsqueeze(x, 0))  →  unsqueeze(op(x), 0)
Must have: an axis of size 1 in front. An op that is not in the table keeps its batch axis, and its result is split as
unsqueeze(squeeze(y, 0), 0), so that what follows can still drop it.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, fx
from torch._ops import OpOverload

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, reshaped, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import dim_count, dim_of, fake_of, front_dim, is_one, same_shape, shape_of, tensor_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for node in graph.inputs():
        value = tensor_of(node)
        if value is not None and value.dim() > 1 and is_one(value.shape[0]):
            log.step(f"input {node.name} loses its batch axis", node)
            _unbatch_input(graph.graph, node, value)
    for node in list(graph.graph.nodes):
        if node.op == "call_function":
            _unbatch(graph.graph, node, log)
    output = graph.graph.output_node()
    for returned in dict.fromkeys(graph.returned()):
        plain = _unbatched(returned)
        if plain is not None:
            log.step(f"{returned.name} is returned without its batch axis", returned)
            output.replace_input_with(returned, plain)


def _unbatch_input(graph: fx.Graph, node: fx.Node, value: torch.Tensor) -> None:
    node.meta["val"] = value[0]
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        batched = graph.call_function(aten.unsqueeze.default, (node, 0))
    node.replace_all_uses_with(batched, delete_user_cb=lambda user: user is not batched)


def _unbatch(graph: fx.Graph, node: fx.Node, log: RewriteLog) -> None:
    if any(_unbatched(a) is not None for a in node.all_input_nodes):
        rule = _RULES.get(node.target)
        new = rule(node) if rule is not None else None
    elif node.target in (aten.reshape.default, aten.expand.default):
        new = _added_axis(node)
    elif node.target is operator.getitem:
        new = _chosen(node)
    else:
        return
    if new is not None:
        log.step(f"{node.name} without its batch axis", node)
        if isinstance(new, int):
            _replace_by_number(node, new)
            graph.erase_node(node)
        else:
            substitute(graph, node, new)
        return
    value = tensor_of(node)
    if node.target is aten.unsqueeze.default or value is None or value.dim() < 2 or not is_one(value.shape[0]):
        return
    if all(u.target is aten.squeeze.dim for u in node.users):
        return
    log.step(f"{node.name} is not known to work without its batch axis, what uses it may be", node)
    with graph.inserting_after(node):
        split = graph.call_function(aten.squeeze.dim, (node, 0))
    with graph.inserting_after(split):
        joined = graph.call_function(aten.unsqueeze.default, (split, 0))
    node.replace_all_uses_with(joined, delete_user_cb=lambda user: user is not split)


def _chosen(node: fx.Node) -> Call | None:
    """Rewrite one result of a topk."""
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.topk.default:
        return None
    arguments = call_arguments(source)
    x, dim = _unbatched(arguments["self"]), dim_of(source)
    if x is None or dim == 0:
        return None
    options = arguments["largest"], arguments["sorted"]
    return _batched(Call(operator.getitem, (Call(aten.topk.default, (x, arguments["k"], dim - 1, *options)), index)))


def _gather(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    x, index, dim = _unbatched(arguments["self"]), _unbatched(arguments["index"]), dim_of(node)
    return None if x is None or index is None or dim == 0 else _batched(Call(node.target, (x, dim - 1, index)))


def _replace_by_number(node: fx.Node, number: int) -> None:
    """Give a node's users a size that is known now."""
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)


def _unbatched(value: Any) -> fx.Node | None:
    """x of unsqueeze(x, 0)."""
    is_added = isinstance(value, fx.Node) and value.target is aten.unsqueeze.default and dim_of(value) == 0
    return call_arguments(value)["self"] if is_added else None


def _batched(x: Call | None) -> Call | None:
    return None if x is None else Call(aten.unsqueeze.default, (x, 0))


def _broadcast(node: fx.Node) -> Call | None:
    """Pointwise ops: arguments of the result's rank lose their first axis, those of a lower rank do not have it."""
    value = fake_of(node)
    if not is_one(value.shape[0]):
        return None
    args: list[Any] = []
    for argument in node.args:
        tensor = tensor_of(argument)
        if tensor is None or tensor.dim() < value.dim():
            args.append(argument)
        else:
            args.append(_unbatched(argument) or Call(aten.squeeze.dim, (argument, 0)))
    return _batched(Call(node.target, tuple(args), dict(node.kwargs)))


def _along(*dim_names: str) -> Callable[[fx.Node], Call | None]:
    """Ops over dims of their first argument, which move one to the front; not over the batch axis itself."""

    def rule(node: fx.Node) -> Call | None:
        arguments = call_arguments(node)
        first = next(iter(arguments))
        source = _unbatched(arguments[first])
        if source is None:
            return None
        moved: dict[str, Any] = {}
        for name in dim_names:
            dims = arguments[name]
            front = [front_dim(d, dim_count(node)) for d in (dims if isinstance(dims, list | tuple) else [dims])]
            if 0 in front:
                return None
            moved[name] = [d - 1 for d in front] if isinstance(dims, list | tuple) else front[0] - 1
        return _batched(_call(node, {**arguments, **moved, first: source}))

    return rule


def _call(node: fx.Node, arguments: dict[str, Any]) -> Call:
    """The node's op with other arguments, keyword-only ones by name."""
    if not isinstance(node.target, OpOverload):
        return Call(node.target, tuple(arguments.values()))
    schema = node.target._schema.arguments
    named = [a for a in schema if not a.kwarg_only]
    while named and named[-1].has_default_value() and arguments[named[-1].name] == named[-1].default_value:
        named.pop()
    positional = tuple(arguments[a.name] for a in named)
    keywords = {a.name: arguments[a.name] for a in schema if a.kwarg_only and arguments[a.name] != a.default_value}
    return Call(node.target, positional, keywords)


def _joined(node: fx.Node) -> Call | None:
    """The call for cat and stack of tensors that all have the batch axis."""
    dim, tensors = dim_of(node), call_arguments(node)["tensors"]
    sources = [_unbatched(t) or _squeezable(t) for t in tensors]
    return None if dim == 0 or None in sources else _batched(Call(node.target, (sources, dim - 1)))


def _squeezable(node: fx.Node) -> Call | None:
    tensor = tensor_of(node)
    has_axis = tensor is not None and tensor.dim() > 1 and is_one(tensor.shape[0])
    return Call(aten.squeeze.dim, (node, 0)) if has_axis else None


def _reshape(node: fx.Node) -> Call | None:
    source, shape = _unbatched(node.args[0]), shape_of(node)
    if source is None:
        return None
    is_batched = len(shape) > 1 and is_one(shape[0])
    return _batched(reshaped(source, shape[1:])) if is_batched else reshaped(source, shape)


def _added_axis(node: fx.Node) -> Call | None:
    """A reshape or expand that puts the batch axis back before the tokens."""
    source, shape = call_arguments(node)["self"], shape_of(node)
    if len(shape) < 2 or not is_one(shape[0]) or not any(isinstance(s, SymInt) for s in shape):
        return None
    if same_shape(shape_of(source), shape[1:]):
        return Call(aten.unsqueeze.default, (source, 0))
    return None if node.target is aten.expand.default else _batched(reshaped(source, shape[1:]))


def _expand(node: fx.Node) -> Call | None:
    source, value = _unbatched(node.args[0]), fake_of(node)
    if source is None or value.dim() != fake_of(node.args[0]).dim() or not is_one(value.shape[0]):
        return None
    return _batched(Call(aten.expand.default, (source, list(call_arguments(node)["size"])[1:])))


def _taken_away(node: fx.Node) -> Call | fx.Node | None:
    """The tensor without the batch axis, for squeeze and select along that axis; for another axis, the call along
    it."""
    source = _unbatched(node.args[0])
    return source if source is not None and dim_of(node) == 0 else _along("dim")(node)


def _first_tensor(node: fx.Node) -> Call | None:
    """Ops over the last axes of their first argument, with other arguments that have no batch axis."""
    first, *rest = node.args
    source = _unbatched(first)
    if source is None or any(_unbatched(a) is not None for a in rest):
        return None
    return _batched(Call(node.target, (source, *rest), dict(node.kwargs)))


def _layer_norm(node: fx.Node) -> Call | None:
    return _first_tensor(node) if len(call_arguments(node)["normalized_shape"]) < fake_of(node).dim() else None


def _embedding(node: fx.Node) -> Call | None:
    weight, ids, *rest = node.args
    source = _unbatched(ids)
    return None if source is None else _batched(Call(node.target, (weight, source, *rest)))


def _matmul(node: fx.Node) -> Call | None:
    first, second = (fake_of(a).dim() for a in node.args)
    if first < 3 or first != second:
        return None
    sources = [_unbatched(a) or _squeezable(a) for a in node.all_input_nodes]
    if len(sources) == 1:
        sources *= 2
    return None if None in sources else _batched(Call(node.target, tuple(sources)))


def _attention(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    sources: dict[str, Any] = {name: _unbatched(arguments[name]) for name in ("query", "key", "value")}
    mask = tensor_of(arguments["attn_mask"])
    if None in sources.values():
        return None
    if mask is not None and mask.dim() == fake_of(arguments["query"]).dim():
        sources["attn_mask"] = _unbatched(arguments["attn_mask"]) or _squeezable(arguments["attn_mask"])
        if sources["attn_mask"] is None:
            return None
    return _batched(_call(node, {**arguments, **sources}))


def _size(node: fx.Node) -> Call | int | None:
    source, dim = _unbatched(node.args[0]), dim_of(node)
    if source is None:
        return None
    return 1 if dim == 0 else Call(aten.sym_size.int, (source, dim - 1))


_RULES: dict[Any, Callable[[fx.Node], Call | fx.Node | int | None]] = {
    **dict.fromkeys(POINTWISE, _broadcast),
    operator.getitem: lambda node: None,
    aten.amax.default: _along("dim"),
    aten.cat.default: _joined,
    aten.cumsum.default: _along("dim"),
    aten.embedding.default: _embedding,
    aten.expand.default: _expand,
    aten.full_like.default: _first_tensor,
    aten.gather.default: _gather,
    aten.layer_norm.default: _layer_norm,
    aten.leaky_relu.default: _broadcast,
    aten.linear.default: _first_tensor,
    aten.matmul.default: _matmul,
    aten.mean.dim: _along("dim"),
    aten.repeat_interleave.self_int: _along("dim"),
    aten.reshape.default: _reshape,
    aten.rms_norm.default: _layer_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.select.int: _taken_away,
    aten.slice.Tensor: _along("dim"),
    aten.softmax.int: _along("dim"),
    aten.squeeze.dim: _taken_away,
    aten.stack.default: _joined,
    aten.sum.dim_IntList: _along("dim"),
    aten.sym_size.int: _size,
    aten.transpose.int: _along("dim0", "dim1"),
    aten.tril.default: _first_tensor,
    aten.triu.default: _first_tensor,
    aten.unsqueeze.default: _along("dim"),
    aten.var.correction: _along("dim"),
}


def _of_one_text(x: Any, weight: Any) -> tuple[Any, ...]:
    text = aten.unsqueeze.default(x, 0)
    channels = aten.linear.default(text, weight)
    heads = aten.transpose.int(aten.reshape.default(channels, [1, -1, 2, 2]), 1, 2)
    attended = aten.matmul.default(aten.softmax.int(heads, -1), aten.transpose.int(heads, 2, 3))
    mean = aten.mean.dim(aten.cat.default([channels, text], -1), [-1], True)
    return aten.squeeze.dim(aten.add.Tensor(channels, mean), 0), aten.select.int(attended, 0, 0)


remove_batch_axis = GraphPass(
    "remove_batch_axis",
    _run,
    Numerics.EXACT,
    Stage.CAPTURED,
    examples=(Example(_of_one_text, {"x": ("T", 4), "weight": (4, 4)}, frozenset({"weight"})),),
)
