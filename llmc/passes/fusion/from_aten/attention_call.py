"""The llmc.attention that takes the place of an attention over [heads, tokens, channels]."""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.passes.fusion.from_aten.causal_mask import CausalMask
from llmc.passes.node_rules import Call
from llmc.passes.recorded_graph import constant_weight
from llmc.passes.shapes import dim_of, fake_of, same_size, shape_of

aten = torch.ops.aten


def attention_call(
    graph: ModelGraph,
    node: fx.Node,
    qkv: tuple[Any, Any, Any],
    scale: float,
    mask: CausalMask,
    softcap: float | None = None,
) -> Call:
    """The replacement of a node: llmc.attention by token, transposed to the node's [heads, tokens, value_dim].

    qkv: query [heads, tokens, head_dim], key and value [kv_heads, tokens, …]; repeated heads are passed once. Raises
    Refused for arguments that llmc.attention does not support.
    """
    q, k, v = qkv
    query, key, value = (fake_of(t) for t in qkv)
    shapes = ", ".join(describe(t) for t in (query, key, value))
    if {query.dim(), key.dim(), value.dim()} != {3}:
        raise Refused(f"query, key and value are {shapes}, expected [heads, tokens, channels] each", node)
    if not same_size(query.shape[1], key.shape[1]) or not same_size(key.shape[1], value.shape[1]):
        raise Refused(f"query, key and value are {shapes}, expected equal numbers of keys and queries", node)
    if not query.dtype is key.dtype is value.dtype:
        raise Refused(f"query, key and value are {shapes}, expected one dtype", node)
    once = _repeated_heads(k), _repeated_heads(v)
    if None not in once and shape_of(once[0])[0] == shape_of(once[1])[0]:
        k, v = once
    heads = [int(shape_of(t)[0]) for t in (q, k, v)]
    if heads[0] % heads[1] or heads[1] != heads[2]:
        raise Refused(f"{heads[0]} query heads cannot share {heads[1]} key and {heads[2]} value heads", node)
    if mask.slopes is not None and len(mask.slopes) != heads[0]:
        raise Refused(f"{len(mask.slopes)} heads have their own slopes, expected {heads[0]}", node)
    options: dict[str, Any] = {} if mask.chunk is None else {"chunk": mask.chunk}
    if mask.slopes is not None:
        options["slopes"] = constant_weight(graph, "slopes", torch.tensor(mask.slopes, dtype=torch.float32))
    by_token = [Call(aten.transpose.int, (t, 0, 1)) for t in (q, k, v)]
    attention = Call(torch.ops.llmc.attention.default, (*by_token, scale, mask.window, softcap, None), options)
    return Call(aten.transpose.int, (attention, 0, 1))


def _repeated_heads(node: fx.Node) -> fx.Node | None:
    """x where each head of x [kv_heads, tokens, channels] is put several times in a row; None if it is not so."""
    if node.target is aten.repeat_interleave.self_int:
        return node.all_input_nodes[0] if call_arguments(node)["dim"] is not None and dim_of(node) == 0 else None
    if node.target is not aten.reshape.default:
        return None
    expanded = node.all_input_nodes[0]
    if expanded.target is not aten.expand.default:
        return None
    spread = expanded.all_input_nodes[0]
    if spread.target is not aten.unsqueeze.default or spread.args[1] != 1:
        return None
    source = spread.all_input_nodes[0]
    before, whole, result = (shape_of(value) for value in (source, expanded, node))
    if len(before) != 3 or len(whole) != 4:
        return None
    return source if same_size(result[0], whole[0] * whole[1]) and result[2] == before[2] else None
