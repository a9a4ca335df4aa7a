"""Recognise torch's scaled_dot_product_attention as llmc.attention.

    SDPA(q, k, v, is_causal=True, scale=s)  →  llmc.attention(q, k, v, s), by token
    SDPA(q, k, v, mask)                     →  the same, with the window, chunk or slopes that the mask has
Must have: causal, by argument or by the mask's values; no dropout; equal numbers of keys and queries, [heads, tokens,
channels]. Key and value heads repeated in front of it, or by enable_gqa, are passed once.
"""

from functools import partial
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.passes.example import Example
from llmc.passes.fusion.from_aten.attention_call import attention_call
from llmc.passes.fusion.from_aten.causal_mask import CausalMask, read_mask
from llmc.passes.node_rules import Call, Rule, rule_pass
from llmc.passes.rewrite import Numerics
from llmc.passes.shapes import shape_of

aten = torch.ops.aten


def _rules(graph: ModelGraph) -> dict[Any, Rule]:
    return {aten.scaled_dot_product_attention.default: partial(_attention, graph)}


def _attention(graph: ModelGraph, node: fx.Node) -> Call:
    arguments = call_arguments(node)
    if arguments["dropout_p"] != 0:
        raise Refused(f"the attention drops out {arguments['dropout_p']} of its weights", node)
    mask = _mask(node, graph)
    qkv = (arguments["query"], arguments["key"], arguments["value"])
    scale = shape_of(qkv[0])[-1] ** -0.5 if arguments["scale"] is None else float(arguments["scale"])
    return attention_call(graph, node, qkv, scale, mask)


def _mask(node: fx.Node, graph: ModelGraph) -> CausalMask:
    arguments = call_arguments(node)
    mask = arguments["attn_mask"]
    if isinstance(mask, fx.Node):
        return read_mask(mask, graph)
    if not arguments["is_causal"]:
        raise Refused("the attention is not causal: is_causal is False and it has no mask", node)
    return CausalMask(None)


def _causal(q: Any, k: Any, v: Any) -> Any:
    return aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True, scale=0.25)


_TENSORS = {"q": (2, "T", 2), "k": (2, "T", 2), "v": (2, "T", 1)}
fuse_sdpa_attention = rule_pass("fuse_sdpa_attention", _rules, Numerics.REORDER, Example(_causal, _TENSORS))
