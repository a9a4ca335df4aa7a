"""What every pass of the serving and optimized stages must hold: same logits, and nothing left for a second run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from llmc.graph.execute import Chunk, run_steps, run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.render import op_name
from llmc.graph.weights import WeightSource
from llmc.options import BuildOptions
from llmc.passes.pipeline import serving
from llmc.passes.rewrite import Pass
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.serving.page_kv_cache import page_kv_cache

_OPTIONS = BuildOptions()


def rewritten(
    graph: ModelGraph, source: WeightSource, passes: Sequence[Pass], *, tolerance: float = 1e-5
) -> PipelineResult:
    """Serve a canonical graph and run the passes; check that it computes the same, and that nothing is left to do."""
    served = run_pipeline(graph, serving(), _OPTIONS).graph
    result = run_pipeline(served, passes, _OPTIONS)
    assert rewrites(result.records) > 0
    same_logits(graph, result.graph, source, tolerance=tolerance)
    assert rewrites(run_pipeline(result.graph, passes, _OPTIONS).records) == 0
    return result


def refusals(graph: ModelGraph, source: WeightSource, passes: Sequence[Pass]) -> str:
    """Page a canonical graph and run the passes, which must leave it alone; their refusals, one a line.

    All rows get logits, since a selection would rename the nodes that the reasons are about.
    """
    served = run_pipeline(graph, (page_kv_cache,), _OPTIONS).graph
    result = run_pipeline(served, passes, _OPTIONS)
    assert rewrites(result.records) == 0
    same_logits(graph, result.graph, source, tolerance=1e-6)
    return "\n".join(f"{r.node}: {r.reason}" for record in result.records for r in record.refusals)


def same_logits(before: ModelGraph, after: ModelGraph, source: WeightSource, *, tolerance: float) -> None:
    """Two sequences: each whole, one token by token beside the other's chunks, against the canonical graph."""
    first, second = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7]
    wanted = [run_tokens(before, source, tokens) for tokens in (first, second)]
    spread = max(float(w.std()) for w in wanted)
    for tokens, logits in zip((first, second), wanted, strict=True):
        whole = run_tokens(after, source, tokens, block_size=_OPTIONS.block_size)
        torch.testing.assert_close(whole, logits, rtol=0, atol=tolerance * spread)
    steps = [
        [Chunk(0, 0, tuple(first[:6])), Chunk(1, 0, (second[0],))],
        [Chunk(1, 1, (second[1],)), Chunk(0, 6, tuple(first[6:10]))],
        [Chunk(0, 10, (first[10],)), Chunk(1, 2, (second[2],))],
    ]
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step, rows in zip(steps, run_steps(after, source, steps, block_size=_OPTIONS.block_size), strict=True):
        for chunk, logits in zip(step, rows, strict=True):
            seen[chunk.sequence].append(logits)
    for sequence, logits in enumerate(wanted):
        torch.testing.assert_close(torch.cat(seen[sequence]), logits, rtol=0, atol=tolerance * spread)


def rewrites(records: Sequence[PassRecord]) -> int:
    """How many rewrites some passes made."""
    return sum(len(record.rewrites) for record in records)


def histogram(graph: ModelGraph) -> dict[str, int]:
    """How often each op occurs, without views."""
    views = {"getitem", "aten.reshape", "aten.slice.Tensor", "aten.split_with_sizes"}
    names = Counter(op_name(n.target) for n in graph.graph.nodes if n.op == "call_function")
    return {name: count for name, count in sorted(names.items()) if name not in views}
