"""Recognise torch's scaled_dot_product_attention as llmc.attention.

    SDPA(q, k, v, is_causal=True, scale=s)  →  llmc.attention(q, k, v, s), by token
    SDPA(q, k, v, mask)                     →  the same, with the window, chunk or slopes that the mask has
Must have: causal, told or by the mask's values; no dropout; as many keys as queries, of [heads, tokens, channels].
Key and value heads repeated in front of it, or by enable_gqa, are taken once.
"""

from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.fusion.from_aten.attention_call import attention_call
from llmc.passes.fusion.from_aten.causal_mask import CausalMask, read_mask
from llmc.passes.node_rules import Call, Rule, apply_rules
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import tensor_of

aten = torch.ops.aten


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    apply_rules(graph, {aten.scaled_dot_product_attention.default: _rule(graph)}, log)


def _rule(graph: ModelGraph) -> Rule:
    def rule(node: fx.Node) -> Call | Refusal:
        arguments = call_arguments(node)
        if arguments["dropout_p"] != 0:
            return Refusal(f"the attention drops out {arguments['dropout_p']} of its weights", node)
        mask = _mask(node, graph)
        if isinstance(mask, Refusal):
            return mask
        query = tensor_of(arguments["query"])
        assert query is not None
        scale = query.shape[-1] ** -0.5 if arguments["scale"] is None else float(arguments["scale"])
        return attention_call(graph, node, (arguments["query"], arguments["key"], arguments["value"]), scale, mask)

    return rule


def _mask(node: fx.Node, graph: ModelGraph) -> CausalMask | Refusal:
    arguments = call_arguments(node)
    mask = arguments["attn_mask"]
    if isinstance(mask, fx.Node):
        return read_mask(mask, graph)
    if not arguments["is_causal"]:
        return Refusal("the attention is not causal: is_causal is False and it has no mask", node)
    return CausalMask(None)


def _causal(q: Any, k: Any, v: Any) -> Any:
    return aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True, scale=0.25)


fuse_sdpa_attention = GraphPass(
    "fuse_sdpa_attention",
    _run,
    Numerics.REORDER,
    Stage.CAPTURED,
    examples=(Example(_causal, {"q": (2, "T", 2), "k": (2, "T", 2), "v": (2, "T", 1)}),),
)
