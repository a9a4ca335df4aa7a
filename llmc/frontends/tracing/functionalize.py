"""Exported programs in the form that passes expect: no in-place ops, and casts and reshapes by their plain aten ops.

`ExportedProgram.run_decompositions({})` gives the same, but replays the whole graph under functionalization, which
takes longer than the export itself. Most decoders, including those with routers, need only the few replacements below,
made directly on the graph (for the shipped 6-layer model: 0.02 s instead of 1.3 s). All other programs are still
replayed.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.graph.call_arguments import call_arguments
from llmc.graph.dead_code import writes_memory

aten = torch.ops.aten


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops; linear, attention, softmax and einsum are kept. Takes `program` over."""
    mutates = any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs)
    if mutates or not all(_is_simple(node) for node in program.graph.nodes):
        functional: ExportedProgram = program.run_decompositions({})
        return functional
    graph = program.graph
    for node in list(graph.nodes):
        if writes_memory(node):
            _replace_in_place(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(rule(graph, node))
            graph.erase_node(node)
    return program


def _is_simple(node: fx.Node) -> bool:
    """Whether the node is right as it is, or has a rule that applies to it."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return node.target.__module__ in ("_operator", "math")
    if node.target is aten.flatten.using_ints:
        return sum(not isinstance(size, int) for size in node.meta["val"].shape) <= 1
    if node.target in _RULES:
        return _has_usual_options(node)
    if writes_memory(node):
        return _can_replace(node)
    schema = node.target._schema
    # Ops that functionalization decomposes: composite ops that may return their input.
    aliases = any(result.alias_info is not None for result in schema.returns)
    return not (aliases and node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _can_replace(node: fx.Node) -> bool:
    """Whether an in-place op writes memory that no other value shares, and its functional form returns the same
    type."""
    if node.target is aten.copy_.default:
        return _fills_slice(node)
    plain, written = _plain_form(node), node.args[0]
    if plain is None or not isinstance(written, fx.Node) or not _is_fresh(written):
        return False
    if any(user < node and _is_view(user) for user in written.users):
        return False
    values: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["val"])
    with written.meta["val"].fake_mode:
        result: FakeTensor = plain(*values[0], **values[1])
    return bool(result.dtype == written.meta["val"].dtype)


def _fills_slice(node: fx.Node) -> bool:
    """Whether it writes all of a slice of memory that nothing else has seen, as code does that puts halves of heads
    together."""
    part, written = node.args[:2]
    if not isinstance(part, fx.Node) or part.target is not aten.slice.Tensor or not isinstance(written, fx.Node):
        return False
    base, values = part.all_input_nodes[0], (part.meta["val"], written.meta["val"])
    if node.users or not _is_fresh(base) or values[0].dtype != values[1].dtype or values[0].dim() != values[1].dim():
        return False
    seen = [user for user in base.users if user < node and _is_view(user)]
    return all(
        user.target is aten.slice.Tensor and all(_writes(reader, user) and reader <= node for reader in user.users)
        for user in seen
    ) and all(statically_known_true(a == b) for a, b in zip(*(value.shape for value in values), strict=True))


def _writes(node: fx.Node, part: fx.Node) -> bool:
    return node.target is aten.copy_.default and node.args[0] is part and node.args[1] is not part


def _plain_form(node: fx.Node) -> OpOverload | None:
    """aten.div.Tensor of aten.div_.Tensor."""
    namespace, name, overload = str(node.target).split(".")
    packet = getattr(aten, name.removesuffix("_"), None)
    if namespace != "aten" or not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    plain: OpOverload = getattr(packet, overload)
    return plain


def _is_fresh(node: fx.Node) -> bool:
    """Whether the node's value is new memory, and not said to be so by a composite op that may give its input."""
    if node.target is operator.getitem:
        return _is_fresh(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or _is_view(node):
        return False
    composite = node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return not composite or node.target in (aten.linear.default, aten.matmul.default)


def _is_view(node: fx.Node) -> bool:
    """Or written in place."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return node.target in _RULES or any(result.alias_info is not None for result in node.target._schema.returns)


def _replace_in_place(graph: fx.Graph, node: fx.Node) -> None:
    """Later readers of the written value read the functional op's result."""
    written = node.all_input_nodes[0]
    with graph.inserting_before(node):
        if node.target is aten.copy_.default:
            part, written = written, written.all_input_nodes[0]
            value = _insert(graph, written, aten.slice_scatter.default, (written, node.args[1], *part.args[1:]))
        else:
            plain = _plain_form(node)
            assert plain is not None
            value = _insert(graph, node, plain, node.args, **node.kwargs)
    written.replace_all_uses_with(value, lambda user: node < user)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _has_usual_options(node: fx.Node) -> bool:
    arguments = call_arguments(node)
    if arguments.get("train") or arguments.get("copy") or arguments.get("non_blocking"):
        return False
    # 0: how the schema of aten.contiguous writes its default.
    if arguments.get("memory_format") not in (None, 0, torch.contiguous_format):
        return False
    # A cast to another device would stay in the graph as one.
    device = arguments.get("device")
    return device is None or torch.device(device) == _value(node).device


def _value(node: fx.Node) -> FakeTensor:
    value: FakeTensor = node.all_input_nodes[0].meta["val"]
    return value


def _insert(graph: fx.Graph, like: fx.Node, target: OpOverload, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """A node with the value and origin of `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    return node


def _cast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    dtype = node.meta["val"].dtype
    if _value(node).dtype == dtype:
        return node.all_input_nodes[0]
    return _insert(graph, node, aten._to_copy.default, (node.all_input_nodes[0],), dtype=dtype)


def _drop(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _value(node).is_contiguous():
        return node.all_input_nodes[0]
    return _contiguous_copy(graph, node)


def _contiguous_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = _insert(graph, node, aten.clone.default, (node.args[0],), memory_format=torch.contiguous_format)
    with _value(node).fake_mode:
        copy.meta["val"] = _value(node).clone(memory_format=torch.contiguous_format)
    return copy


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return _viewed(graph, node, node.args[1])


def _flatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return _viewed(graph, node, [size if isinstance(size, int) else -1 for size in node.meta["val"].shape])


def _viewed(graph: fx.Graph, node: fx.Node, shape: Any) -> fx.Node:
    x = node.args[0] if _can_view(_value(node), node.meta["val"]) else _contiguous_copy(graph, node)
    return _insert(graph, node, aten.view.default, (x, shape))


def _can_view(x: FakeTensor, result: FakeTensor) -> bool:
    if x.is_contiguous():
        return True
    try:
        with x.fake_mode:
            x.view(result.shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _chunk(graph: fx.Graph, node: fx.Node) -> fx.Node:
    dim = call_arguments(node)["dim"]
    size = node.meta["val"][0].shape[dim]
    return _insert(graph, node, aten.split.Tensor, (node.args[0], size, dim))


_RULES: Mapping[OpOverload, Callable[[fx.Graph, fx.Node], fx.Node]] = MappingProxyType(
    {
        aten.to.dtype: _cast,
        aten.to.device: _cast,
        aten.to.dtype_layout: _cast,
        aten.dropout.default: _drop,
        aten.contiguous.default: _contiguous,
        aten.reshape.default: _reshape,
        aten.chunk.default: _chunk,
        aten.flatten.using_ints: _flatten,
    }
)
