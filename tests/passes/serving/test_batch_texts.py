"""Whole texts in a step: pooling and attention learn where texts begin, and what else reads pooled rows is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmc.errors import PassError
from llmc.graph.execute import interpret
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.graph.weights import evaluate
from llmc.options import BuildOptions
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.serving.batch_texts import batch_texts
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.passes.serving.select_logit_rows import select_logit_rows
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import rewrites

_OPS = torch.ops.llmc


def encoder(pooling: str) -> tuple[ModelGraph, TensorSource]:
    """Attention to both sides, pooling, and a product of what is pooled."""
    b = GraphBuilder()
    x = b.embedded()
    q, k, v = (b.call(torch.ops.aten.reshape.default, b.linear(x, name, 8), [-1, 2, 4]) for name in "qkv")
    seen = b.call(_OPS.bidirectional_attention.default, q, k, v, 0.5, 3)
    states = b.call(torch.ops.aten.reshape.default, seen, [-1, 8])
    return b.finish(b.call(_OPS.pool.default, states, pooling))


def served(graph: ModelGraph) -> PipelineResult:
    return run_pipeline(graph.copy(), (page_kv_cache, select_logit_rows, batch_texts), BuildOptions())


def step_of(graph: ModelGraph, source: TensorSource, texts: list[list[int]]) -> Tensor:
    """The last row of each text, all in one step."""
    lengths = torch.tensor([len(text) for text in texts])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    tokens, requests = int(starts[-1]), len(texts)
    values: dict[str, Tensor] = {
        "input_ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "positions": torch.cat([torch.arange(len(text)) for text in texts]).int(),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int32),
        "query_starts": starts,
        "context_lens": lengths.int(),
        "block_tables": torch.zeros(requests, 1, dtype=torch.int32),
        "logit_rows": starts[1:] - 1,
        "tree_masks": torch.zeros(tokens, dtype=torch.int64),
    }
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}
    return interpret(graph, weights | values)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_are_kept_apart(pooling: str, golden: Callable[[str, str], None]) -> None:
    graph, source = encoder(pooling)
    result = served(graph)
    golden(f"passes/batch_texts_{pooling}.txt", render(result.graph))
    texts = [[5, 3, 11, 2, 7], [1], [16, 4, 4]]
    together = step_of(result.graph, source, texts)
    for row, text in zip(together, texts, strict=True):
        torch.testing.assert_close(row, step_of(result.graph, source, [text])[0])
    assert rewrites(run_pipeline(result.graph.copy(), (batch_texts,), BuildOptions()).records) == 0


def test_rows_of_every_token_are_refused() -> None:
    graph, _ = encoder("mean")
    with pytest.raises(PassError, match="reads what texts are pooled to at every token"):
        run_pipeline(graph.copy(), (page_kv_cache, batch_texts), BuildOptions())
