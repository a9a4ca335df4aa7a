"""Make the products that read the same input one: Q, K and V, or any others that no other fusion has taken.

    linear(x, wq, bq), linear(x, wk, bk), linear(x, wv, bv)
        ->  y = linear(x, [wq; wk; wv], [bq; bk; bv]);  y[:, :q], y[:, q:q+k], y[:, q+k:]
Must have: at least two; all with a bias or all without; weights of one dtype that nothing else reads (a tied one
stays apart). Runs after the fusions of gated and activated products, so that those keep their epilogues.
Numerics: exact, since each output channel is summed as before. Saves reading x again, and one launch each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.fusion.merged_weight import check_stackable, stack_rows
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_LINEAR = torch.ops.llmc.linear.default


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Merge each group of products of one input, in order."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=_LINEAR):
        groups.setdefault(call_arguments(node)["x"], []).append(node)
    for linears in groups.values():
        if len(linears) == 1:
            continue
        with log.refusing():
            _check(graph, linears)
            log.step(" + ".join(n.name for n in linears), *linears)
            merge_products(graph, linears)


def _three_products(x: Any, q: Any, k: Any, v: Any, q_bias: Any, k_bias: Any, v_bias: Any) -> tuple[Any, ...]:
    return _LINEAR(x, q, q_bias), _LINEAR(x, k, k_bias), _LINEAR(x, v, v_bias)


_WEIGHTS = {"q": (4, 3), "k": (2, 3), "v": (2, 3), "q_bias": (4,), "k_bias": (2,), "v_bias": (2,)}
merge_qkv = GraphPass(
    "merge_qkv",
    run,
    Numerics.REORDER,
    Stage.OPTIMIZED,
    examples=(Example(_three_products, {"x": ("T", 3), **_WEIGHTS}, frozenset(_WEIGHTS)),),
)


def _check(graph: ModelGraph, linears: Sequence[fx.Node]) -> None:
    biases = [call_arguments(n)["bias"] for n in linears]
    for node, bias in zip(linears, biases, strict=True):
        if (bias is None) != (biases[0] is None):
            reason = f"{linears[0].name} has the bias {biases[0]}, {node.name} of the same input {bias}"
            raise Refused(reason, node)
    check_stackable(graph, [(call_arguments(n)["weight"], n) for n in linears])
    if biases[0] is not None:
        check_stackable(graph, list(zip(biases, linears, strict=True)))


def merge_products(graph: ModelGraph, linears: Sequence[fx.Node]) -> None:
    """Make one product of several of one input, and slices of it."""
    arguments = [call_arguments(n) for n in linears]
    weight = stack_rows(graph, [a["weight"] for a in arguments])
    bias = None if arguments[0]["bias"] is None else stack_rows(graph, [a["bias"] for a in arguments])
    last_axis = linears[0].meta["val"].ndim - 1
    start = 0
    with graph.graph.inserting_before(min(linears)):
        merged = graph.graph.call_function(_LINEAR, (arguments[0]["x"], weight, bias))
        for node in linears:
            end = start + node.meta["val"].shape[-1]
            part = graph.graph.call_function(torch.ops.aten.slice.Tensor, (merged, last_axis, start, end))
            node.replace_all_uses_with(part)
            start = end
    for node in linears:
        graph.graph.erase_node(node)
