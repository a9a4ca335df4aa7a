"""The contract of canonicalization: every attention, norm, rotation and product is one llmc:: op.

Adds nothing to the graph; raises PassError for what is left over, with the source line and the refusals that explain
it. A contract is named by what was to be recognised, and may be given up by that name in allow_fallback.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import SymInt, fx

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.graph.verify import FALLBACK_OPS, LEGAL_OPS, is_legal
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog, source_line

aten = torch.ops.aten

_CONTRACTS: dict[str, frozenset[Any]] = {
    "attention": frozenset(
        {
            aten.softmax.int,
            aten._safe_softmax.default,
            aten.scaled_dot_product_attention.default,
            aten.view_as_complex.default,
        }
    ),
    "linear": FALLBACK_OPS["linear"] | {aten.einsum.default},
    "norm": frozenset({aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}),
    "embedding": frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}),
}


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    allowed = frozenset().union(*(FALLBACK_OPS.get(name, frozenset()) for name in options.allow_fallback))
    legal = LEGAL_OPS[Stage.CANONICAL] | allowed
    left = [n for n in graph.graph.nodes if n.op == "call_function" and not is_legal(n, legal)]
    if left:
        raise _left_over(left, log)
    shaped = [n for n in graph.graph.nodes if isinstance(n.meta.get("val"), SymInt)]
    if shaped:
        raise _left_over(shaped, log)


def _left_over(nodes: list[fx.Node], log: RewriteLog) -> PassError:
    # The op that gives the most away: a leftover softmax says more than the mask that was built for it.
    named = [(name, n) for name, ops in _CONTRACTS.items() for n in nodes if n.target in ops]
    name, node = named[0] if named else ("pointwise", nodes[0])
    reasons = [r for r in log.history() if r.source == source_line(node.meta.get("stack_trace"))] or list(log.history())
    because = "".join(f"\n  refused: {r.reason} (at {r.node})" for r in reasons[:4])
    problem = f"{op_name(node.target)} was not recognised as part of a known {name} op ({len(nodes)} such ops){because}"
    return PassError(
        problem,
        at=source_line(node.meta.get("stack_trace")) or node.format_node(),
        fix="write it in a form that llmc knows, or report the model",
    )


check_canonical = GraphPass("check_canonical", _run, Numerics.EXACT, Stage.CANONICAL)
