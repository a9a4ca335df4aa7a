"""Make the last product llmc.lm_head, whose logits stay in fp32, and compute what follows it in fp32 too.

    cast(c · tanh(linear(x, weight) / c))  →  c · tanh(lm_head(x, weight) / c)
    norm(x)  →  cast(norm(x), float32)                                               (rows of texts without a product)
Must have: between the last linear and the logits only pointwise ops with constants.
"""

from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pointwise import POINTWISE
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_OPS = torch.ops.llmc
_CAST = torch.ops.aten._to_copy.default


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    output = graph.graph.output_node()
    chain: list[fx.Node] = []
    logits = graph.logits()
    node: Any = logits
    while node.target in POINTWISE and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.all_input_nodes[0]
    if node.target is _OPS.lm_head.default:
        return
    if node.target is not _OPS.linear.default and graph.info.head is not None:
        _return_in_fp32(graph, logits, log)
        return
    if node.target is not _OPS.linear.default:
        raise PassError(
            f"the logits come from {node.target}, expected a linear followed by pointwise ops with constants",
            at=source_line(node) or node.format_node(),
            fix="return the logits of the output projection",
        )
    log.step(f"logits from {node.name}", node)
    arguments = call_arguments(node)
    with graph.graph.inserting_before(output):
        value = graph.graph.call_function(_OPS.lm_head.default, tuple(arguments[n] for n in ("x", "weight", "bias")))
        previous = node
        for each in reversed(chain):
            if each.target is not _CAST:
                args = tuple(value if a is previous else a for a in each.args)
                value = graph.graph.create_node("call_function", each.target, args, dict(each.kwargs))
            previous = each
    if value is not logits:
        output.args = ((value, *graph.returned()[1:]) if graph.side_outputs else value,)


def _return_in_fp32(graph: ModelGraph, rows: fx.Node, log: RewriteLog) -> None:
    """What an embedding is need not be the result of a product."""
    if rows.meta["val"].dtype is torch.float32:
        return
    log.step(f"return {rows.name} in fp32", rows)
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        value = graph.graph.call_function(_CAST, (rows,), {"dtype": torch.float32})
    output.replace_input_with(rows, value)


make_lm_head = GraphPass("make_lm_head", _run, Numerics.REORDER, Stage.CAPTURED)
