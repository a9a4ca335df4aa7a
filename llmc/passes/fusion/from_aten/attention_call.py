"""The llmc.attention that takes the place of an attention over [heads, tokens, channels]."""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.weights import Constant
from llmc.passes.fusion.from_aten.causal_mask import CausalMask
from llmc.passes.node_rules import Call
from llmc.passes.recorded_graph import new_weight
from llmc.passes.shapes import front_dim, same_size, tensor_of

aten = torch.ops.aten


def attention_call(
    graph: ModelGraph,
    node: fx.Node,
    qkv: tuple[Any, Any, Any],
    scale: float,
    mask: CausalMask,
    softcap: float | None = None,
) -> Call | Refusal:
    """What takes node's place: llmc.attention by token, transposed to node's [heads, tokens, value_dim].

    qkv: query [heads, tokens, head_dim], key and value [kv_heads, tokens, …]; heads that were repeated are taken once.
    """
    q, k, v = qkv
    values = [tensor_of(t) for t in qkv]
    shapes = ", ".join(describe(t) for t in values)
    if any(t is None or t.dim() != 3 for t in values):
        return Refusal(f"query, key and value are {shapes}, expected [heads, tokens, channels] each", node)
    query, key, value = (t for t in values if t is not None)
    if not same_size(query.shape[1], key.shape[1]) or not same_size(key.shape[1], value.shape[1]):
        return Refusal(f"query, key and value are {shapes}, expected as many keys as queries", node)
    if not query.dtype is key.dtype is value.dtype:
        return Refusal(f"query, key and value are {shapes}, expected one dtype", node)
    once = [_repeated_heads(t) for t in (k, v)]
    counts = [_first_size(t) for t in once]
    if None not in counts and counts[0] == counts[1]:
        k, v = once
    heads = [int(t.shape[0]) for t in map(tensor_of, (q, k, v)) if t is not None]
    if heads[0] % heads[1] or heads[1] != heads[2]:
        return Refusal(f"{heads[0]} query heads cannot share {heads[1]} key and {heads[2]} value heads", node)
    if mask.slopes is not None and len(mask.slopes) != heads[0]:
        return Refusal(f"{len(mask.slopes)} heads have a slope of their own, expected {heads[0]}", node)
    options: dict[str, Any] = {} if mask.chunk is None else {"chunk": mask.chunk}
    if mask.slopes is not None:
        options["slopes"] = _slopes(graph, mask.slopes, query)
    by_token = [Call(aten.transpose.int, (t, 0, 1)) for t in (q, k, v)]
    attention = Call(torch.ops.llmc.attention.default, (*by_token, scale, mask.window, softcap, None), options)
    return Call(aten.transpose.int, (attention, 0, 1))


def _slopes(graph: ModelGraph, slopes: tuple[float, ...], query: torch.Tensor) -> fx.Node:
    """The weight that holds them, one for all layers that have the same."""
    value = torch.tensor(slopes, dtype=torch.float32)
    for node in graph.weight_nodes():
        recipe = graph.weights[node.name]
        if isinstance(recipe, Constant) and torch.equal(recipe.value, value):
            return node
    return new_weight(graph, "slopes", Constant(value), query.new_empty(len(slopes), dtype=torch.float32))


def _first_size(node: fx.Node | None) -> int | None:
    tensor = tensor_of(node)
    return None if tensor is None else int(tensor.shape[0])


def _repeated_heads(node: Any) -> fx.Node | None:
    """x where each head of x [kv_heads, tokens, channels] is put several times in a row; None if it is not so."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.repeat_interleave.self_int:
        arguments = call_arguments(node)
        source = arguments["self"]
        return source if arguments["dim"] is not None and front_dim(arguments["dim"], 3) == 0 else None
    if node.target is not aten.reshape.default:
        return None
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    spread = expanded.args[0]
    if not isinstance(spread, fx.Node) or spread.target is not aten.unsqueeze.default or spread.args[1] != 1:
        return None
    source, whole, result = spread.args[0], tensor_of(expanded), tensor_of(node)
    before = tensor_of(source)
    if before is None or whole is None or result is None or before.dim() != 3 or not isinstance(source, fx.Node):
        return None
    is_repeat = same_size(result.shape[0], whole.shape[0] * whole.shape[1]) and result.shape[2] == before.shape[2]
    return source if is_repeat and whole.dim() == 4 else None
