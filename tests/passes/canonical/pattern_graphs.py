"""Graphs of a few aten ops written as plain functions, and what every canonical pass must hold on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from llmc.graph.execute import run_tokens
from llmc.graph.pass_record import PassRecord
from llmc.graph.propagate import propagate
from llmc.graph.render import render
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant
from llmc.options import BuildOptions
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline
from tests.graph_builder import GraphBuilder

WIDTH, VOCAB = 8, 17
_LENGTHS = (5, 23)
Body = Callable[..., Any]


class PatternGraph:
    """A captured graph: embedding, then body(x [T, WIDTH], **weights), then logits of a tied table.

    weights: shapes of checkpoint tensors, or tensors that are constants. The body may also take `positions` [T].
    """

    def __init__(self, body: Body, dtype: torch.dtype = torch.float32, **weights: Any) -> None:
        builder = GraphBuilder(dtype=dtype, vocab_size=VOCAB)
        x = builder.embedded(WIDTH)
        nodes = {name: self._weight(builder, name, given) for name, given in weights.items()}
        if "positions" in inspect.signature(body).parameters:
            nodes["positions"] = builder.positions
        tracer = GraphAppendingTracer(builder.graph)
        out = body(fx.Proxy(x, tracer), **{name: fx.Proxy(node, tracer) for name, node in nodes.items()})
        propagate(builder.graph)
        self.graph, self.source = builder.finish(out.node)
        self.graph.stage = Stage.CAPTURED

    @staticmethod
    def _weight(builder: GraphBuilder, name: str, given: Any) -> fx.Node:
        if not isinstance(given, torch.Tensor):
            return builder.weight(name, *given)
        node = builder.weight(name, *(given.shape or (1,)), dtype=given.dtype)
        builder.recipes[node.name] = Constant(given)
        with builder.mode:
            node.meta["val"] = torch.empty(given.shape, dtype=given.dtype)
        return node


def rewritten(made: PatternGraph, *passes: Pass, tolerance: float = 1e-5) -> str:
    """Run the passes; check that they rewrite, compute the same at two lengths, and find nothing the second time."""
    result = run_pipeline(made.graph, passes, BuildOptions())
    assert count(result.records) > 0
    for length in _LENGTHS:
        tokens = [(3 + 5 * i) % VOCAB for i in range(length)]
        before = run_tokens(made.graph, made.source, tokens)
        after = run_tokens(result.graph, made.source, tokens)
        torch.testing.assert_close(after, before, rtol=0, atol=tolerance * float(before.std()))
    assert count(run_pipeline(result.graph, passes, BuildOptions()).records) == 0
    return render(result.graph)


def refusals(made: PatternGraph, *passes: Pass) -> list[str]:
    """Run the passes, which must leave the graph alone, and give their reasons."""
    result = run_pipeline(made.graph, passes, BuildOptions())
    assert count(result.records) == 0
    assert render(result.graph).splitlines()[1:] == render(made.graph).splitlines()[1:]
    return [r.reason for record in result.records for r in record.refusals]


def count(records: Sequence[PassRecord]) -> int:
    """How many rewrites were made."""
    return sum(len(record.rewrites) for record in records)
