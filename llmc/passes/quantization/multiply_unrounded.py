"""Let products multiply what codes stand for as it is, not rounded to the activations' dtype first.

    linear(x, dequantize(c, s, z, f, bf16), b)      ->  linear(x, dequantize(c, s, z, f, fp32), b)
    linear(round_tokens(x, s, f, bf16), w, b)       ->  linear(round_tokens(x, s, f, fp32), w, b, bf16)
    fused_linear, gated_linear, lm_head, embedding  ->  the same
Kernels compute this: decoding is part of the product's own (graph/product_parts.py), and a value that is never written
need not be rounded. Runs after all fusions. A quantized weight or token that something else reads fails the build with
the reasons, unless allow_fallback names `quantized`: it is then decoded in every step.
Must have: a weight that is quantized; every reader of codes' values is a product or an embedding.
Numerics: reorder, since neither weights nor tokens are rounded in between. In fp32 there is nothing to do.
"""

from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import part_of, parts_before, unrounded_parts
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

CONTRACT = "quantized"


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Ask for the exact values before every product."""
    for node in list(graph.graph.nodes):
        parts = parts_before(node)
        if "weight" in parts and parts != unrounded_parts(node):
            log.step(f"{parts['weight'].name} + {node.name}", node, parts["weight"])
            _multiply(graph, node, parts)
    _check(graph, options, log)


multiply_unrounded = GraphPass(
    "multiply_unrounded",
    run,
    Numerics.REORDER,
    Stage.OPTIMIZED,
    unproved="it leaves out a rounding, which is nothing over the reals",
)


def _multiply(graph: ModelGraph, product: fx.Node, parts: dict[str, fx.Node]) -> None:
    """Replace a product by one of unrounded parts, with a result of the same dtype."""
    result = product.meta["val"].dtype
    arguments = call_arguments(product) | {name: _unrounded(graph, part) for name, part in parts.items()}
    if "dtype" in arguments and result is not _dtype_of_itself(arguments):
        arguments["dtype"] = result
    substitute(graph.graph, product, Call(product.target, tuple(arguments.values())))


def _dtype_of_itself(arguments: dict[str, Any]) -> torch.dtype | None:
    """The result's default dtype: that of x, or of the table."""
    source = arguments.get("x", arguments["weight"])
    return torch.float32 if part_of(source) is not None else source.meta["val"].dtype


def _unrounded(graph: ModelGraph, part: fx.Node) -> fx.Node:
    """The same part in fp32: one for all products that read it."""
    arguments = {**call_arguments(part), "dtype": torch.float32}
    for other in part.all_input_nodes[0].users:
        if other.target is part.target and call_arguments(other) == arguments:
            return other
    with graph.graph.inserting_before(part):
        return graph.graph.create_node("call_function", part.target, tuple(arguments.values()))


def _check(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    left = [
        Refusal(f"{user.name}, a {user.target}, reads the dequantized {node.name}", user)
        for node in graph.graph.nodes
        if part_of(node) is not None
        for user in node.users
        if not is_multiplied(node, user)
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


def is_multiplied(part: fx.Node, reader: fx.Node) -> bool:
    """Whether a reader of a part is a product, of a weight that is not dense, whose kernel may compute the part."""
    parts = unrounded_parts(reader)
    return "weight" in parts and part in parts.values()
