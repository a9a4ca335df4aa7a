"""Read many whole texts in a step, for models that give a row for a text.

    bidirectional_attention(q, k, v, …)        ->  ragged_attention(q, k, v, query_starts, …)
    segments(ids, separator, count)            ->  segments_of_texts(ids, query_starts, separator, count)
    select_rows(pool(x, pooling), logit_rows)  ->  pool_rows(x, query_starts, logit_rows, pooling)
Must have: nothing but wanted rows read what texts are pooled to, or the build fails. Such a graph is right for steps
that hold all tokens of each of their texts.
Numerics: reorder, since a mean is a sum over the text and not a difference of running ones.
"""

from typing import Any

import torch

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.source_line import source_line
from llmc.graph.step_inputs import step_input
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog

_llmc = torch.ops.llmc


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    starts = step_input(graph, "query_starts")
    for node in graph.graph.find_nodes(op="call_function", target=_llmc.bidirectional_attention.default):
        log.step(f"keep the texts of {node.name} apart", node)
        arguments = call_arguments(node)
        q, k, v, *others = (arguments[name] for name in ("q", "k", "v", "scale", "window", "softcap"))
        substitute(graph.graph, node, Call(_llmc.ragged_attention.default, (q, k, v, starts, *others)))
    for node in graph.graph.find_nodes(op="call_function", target=_llmc.segments.default):
        log.step(f"keep the pairs of {node.name} apart", node)
        ids, *others = node.args
        substitute(graph.graph, node, Call(_llmc.segments_of_texts.default, (ids, starts, *others)))
    for node in graph.graph.find_nodes(op="call_function", target=_llmc.pool.default):
        for user in list(node.users):
            if user.target is not _llmc.select_rows.default:
                raise PassError(
                    f"{user.name} reads what texts are pooled to at every token, and not at the rows asked for",
                    at=source_line(user) or user.format_node(),
                    fix="let select_logit_rows run before, and use only row-wise operations after the pooling",
                )
            log.step(f"pool the rows asked for in {user.name}", user)
            x, pooling = node.args
            substitute(graph.graph, user, Call(_llmc.pool_rows.default, (x, starts, user.args[1], pooling)))
        graph.graph.erase_node(node)


def _of_a_text(q: Any, k: Any, v: Any, query_starts: Any, rows: Any) -> Any:
    attended = torch.ops.aten.squeeze.dim(_llmc.bidirectional_attention.default(q, k, v, 0.5), 1)
    return _llmc.select_rows.default(_llmc.pool.default(attended, "cls"), rows)


_TENSORS = {
    **{"q": ("T", 1, 2), "k": ("T", 1, 2), "v": ("T", 1, 1)},
    **{"query_starts": torch.tensor([0, 3], dtype=torch.int32), "rows": torch.tensor([2], dtype=torch.int32)},
}
batch_texts = GraphPass(
    "batch_texts",
    _run,
    Numerics.REORDER,
    examples=(Example(_of_a_text, _TENSORS),),
)
