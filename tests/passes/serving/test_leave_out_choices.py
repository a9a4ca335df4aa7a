"""Attention sees all keys where no sequence has more than an indexer chooses; else the choice stays."""

import torch

from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.runner import run_pipeline
from llmc.passes.serving.leave_out_choices import leave_out_choices
from llmc.passes.serving.page_kv_cache import page_kv_cache
from tests.graph_builder import GraphBuilder, TensorSource
from tests.passes.pass_checks import rewrites, same_logits

_OPS = torch.ops.llmc
COUNT = 4


def indexed() -> tuple[ModelGraph, TensorSource]:
    """Two layers' attention over the keys that one indexer chooses."""
    b = GraphBuilder()
    x = b.embedded()
    heads = b.call(torch.ops.aten.reshape.default, b.linear(x, "index_q", 8), [-1, 2, 4])
    chosen = b.call(_OPS.choose_keys.default, heads, b.linear(x, "index_k", 4), b.linear(x, "index_w", 2), COUNT)
    for layer in "ab":
        q, k, v = (b.call(torch.ops.aten.reshape.default, b.linear(x, layer + n, 8), [-1, 2, 4]) for n in "qkv")
        seen = b.call(_OPS.attention.default, q, k, v, 0.5, chosen=chosen)
        x = b.call(torch.ops.aten.reshape.default, seen, [-1, 8])
    return b.finish(x)


def test_short_engines_have_no_indexer() -> None:
    graph, _ = indexed()
    options = BuildOptions(max_model_len=COUNT)
    result = run_pipeline(graph, (leave_out_choices,), options)
    assert "choose_keys" not in render(result.graph) and rewrites(result.records) == 2
    assert rewrites(run_pipeline(result.graph, (leave_out_choices,), options).records) == 0


def test_longer_ones_keep_it() -> None:
    (record,) = run_pipeline(indexed()[0], (leave_out_choices,), BuildOptions(max_model_len=64)).records
    assert [refusal.reason for refusal in record.refusals] == ["4 keys are chosen, of sequences of up to 64 tokens"]


def test_the_keys_that_are_scored_have_a_cache() -> None:
    graph, source = indexed()
    paged = run_pipeline(graph, (leave_out_choices, page_kv_cache), BuildOptions(max_model_len=64)).graph
    scored = paged.caches[0]
    assert (scored.kv_heads, scored.head_dim, scored.value_dim) == (1, 2, 2)
    assert len(paged.caches) == 3
    same_logits(graph, paged, source, tolerance=1e-5)
