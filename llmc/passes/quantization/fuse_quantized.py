"""Multiply codes themselves: dequantized weights and tokens become arguments of quantized products.

    linear(x, dequantize(c, s, z, f), b)            ->  quantized_linear(x, c, s, z, None, b, None, "identity", 1.0, f)
    fused_linear, gated_linear, lm_head, embedding  ->  quantized_linear, quantized_gated_linear, …
also with dequantize_tokens(quantize_tokens(x, xs, xf)) in the place of x, which the product then does itself.
Runs after all fusions, which see products as before. A dequantized weight that ends in no quantized product fails the
build with the reasons, unless allow_fallback names `quantized`: such a weight is dequantized in every step.
Must have: a weight that is dequantized as it is, by an op that has a quantized form, and tokens nobody else reads.
Numerics: reorder, since neither weights nor tokens are rounded to the activations' dtype in between.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

CONTRACT = "quantized"
_llmc = torch.ops.llmc
_DEQUANTIZE = _llmc.dequantize.default
_EMBEDDING = _llmc.embedding.default
_QUANTIZED: dict[Any, torch._ops.OpOverload] = {
    _llmc.linear.default: _llmc.quantized_linear.default,
    _llmc.fused_linear.default: _llmc.quantized_linear.default,
    _llmc.gated_linear.default: _llmc.quantized_gated_linear.default,
    _llmc.lm_head.default: _llmc.quantized_lm_head.default,
    _EMBEDDING: _llmc.quantized_embedding.default,
}


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Fuse every reader of a dequantized weight."""
    for node in [n for n in graph.graph.nodes if n.target in _QUANTIZED]:
        weight = call_arguments(node)["weight"]
        if weight.target is not _DEQUANTIZE:
            continue
        log.step(f"{weight.name} + {node.name}", node, weight)
        with graph.graph.inserting_before(node):
            fused = graph.graph.call_function(_QUANTIZED[node.target], _arguments(node, weight))
        node.replace_all_uses_with(fused)
        graph.graph.erase_node(node)
    _check(graph, options, log)


fuse_quantized = GraphPass("fuse_quantized", run, Numerics.REORDER, Stage.OPTIMIZED)


def _arguments(node: fx.Node, weight: fx.Node) -> tuple[Any, ...]:
    given, stored = call_arguments(node), call_arguments(weight)
    codes = (stored["codes"], stored["scales"], stored["zeros"])
    if node.target is _EMBEDDING:
        return (given["ids"], *codes, stored["format"], stored["dtype"])
    x, x_scale, x_format = _unrounded(given["x"])
    common = (x, *codes, x_scale, given["bias"])
    formats = (stored["format"], x_format)
    if node.target is _llmc.lm_head.default:
        return (*common, *formats)
    if node.target is _llmc.gated_linear.default:
        return (*common, given["activation"], *formats)
    epilogue = (given.get("residual"), given.get("activation", "identity"), given.get("scale", 1.0))
    return (*common, *epilogue, *formats)


def _unrounded(x: fx.Node) -> tuple[fx.Node, fx.Node | None, str]:
    """What a product's input was before it was rounded, the static scale, and the format; "none" if it was not."""
    if x.target is not _llmc.dequantize_tokens.default:
        return x, None, "none"
    codes = call_arguments(x)["codes"]
    if codes.target is not getitem or codes.args[0].target is not _llmc.quantize_tokens.default:
        return x, None, "none"
    rounding = call_arguments(codes.args[0])
    return rounding["x"], rounding["scale"], rounding["format"]


def _check(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    left = [
        Refusal(f"{user.name}, a {user.target}, reads the dequantized {node.name}", user)
        for target in (_DEQUANTIZE, _llmc.dequantize_tokens.default)
        for node in graph.graph.find_nodes(op="call_function", target=target)
        for user in node.users
    ]
    for refusal in left:
        log.refuse(refusal)
    if left and CONTRACT not in options.allow_fallback:
        raise PassError(
            f"{len(left)} quantized tensor(s) have no quantized product: " + "; ".join(r.reason for r in left[:5]),
            at=", ".join(r.node.name for r in left[:5]),
            fix="leave these weights alone (--quantize NAME=none), or build with "
            f"allow_fallback=('{CONTRACT}',) to dequantize them in every step",
        )
