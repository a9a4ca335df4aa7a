"""Ops in front of cut tables: the graph that has them runs, in any chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from llmc.errors import OptionError
from llmc.graph.execute import run_tokens
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.ranks import weight_value
from llmc.graph.render import render
from llmc.ops.score_expected import score_expected
from llmc.options import BuildOptions
from llmc.passes.attention.calibrate_queries import calibrate_queries
from llmc.passes.attention.compress_kv_cache import compress_kv_cache
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.quantize_kv_cache import quantize_kv_cache
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.passes.serving.place_compaction import place_compaction
from llmc.program import CachePolicy
from tests.graph_builder import TensorSource, llama
from tests.passes.pass_checks import histogram, rewrites, same_logits
from tests.tiny_models import tiny_tokens

PASSES = compress_kv_cache, page_kv_cache, place_compaction
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 5
STREAMING = "streaming:budget=32,sinks=3,every=8"
H2O = "h2o:budget=32,recent=8,every=8"
COMPACTOR = "compactor:budget=32,sinks=2,recent=2,every=8,chunk=16"
KVZIP = "kvzip:budget=32,every=8,chunk=16"
LRU = "lru:budget=32,recent=8,every=8"
TRIATTENTION = "triattention:budget=32,recent=4,every=8"


def options(policy: str) -> BuildOptions:
    return BuildOptions(block_size=8, kv_compression=policy, max_model_len=64)


@pytest.mark.parametrize("policy", ["snapkv:budget=32,window=8,every=8", COMPACTOR, H2O, KVZIP, LRU, STREAMING])
def test_places_the_ops_of_every_layer(policy: str, golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=2)
    result = run_pipeline(graph, PASSES, options(policy))
    golden(f"passes/place_compaction_{policy.partition(':')[0]}.txt", render(result.graph))
    same_logits(graph, result.graph, source, tolerance=1e-6)
    assert rewrites(run_pipeline(result.graph, (place_compaction,), options(policy)).records) == 0


def placed(graph: ModelGraph, source: TensorSource, folder: Path, heads: str, **changes: Any) -> PipelineResult:
    """The graph with the ops of triattention, by heads that choose together."""
    text = folder / "text.json"
    text.write_text(json.dumps([token % 17 for token in tiny_tokens(600)]))
    given = vars(options(f"{TRIATTENTION},heads={heads}")) | {"calibration": str(text), "calibration_length": 50}
    return run_pipeline(graph, (calibrate_queries, *PASSES), BuildOptions(**given | changes), data=ModelData(source))


@pytest.mark.parametrize(("heads", "count"), [("layer_kv_head", 3), ("kv_head", 2), ("all", 2)])
def test_scores_take_the_means_of_queries(
    heads: str, count: int, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """The notes on queries end where scores read them; before, at every cut, the graph computes the same."""
    graph, source = llama(layers=2)
    result = placed(graph, source, tmp_path, heads)
    golden(f"passes/place_compaction_triattention_{heads}.txt", render(result.graph))
    assert "llmc.query_means" not in histogram(result.graph)
    assert rewrites(result.records[-1:]) == count
    for stop_after in range(1, 8 + count):
        cut = placed(graph, source, tmp_path, heads, stop_after=stop_after).graph
        torch.testing.assert_close(run_tokens(cut, source, TOKENS[:20]), run_tokens(graph, source, TOKENS[:20]))
    again = run_pipeline(result.graph, (place_compaction,), options(f"{TRIATTENTION},heads={heads}"))
    assert rewrites(again.records) == 0


@pytest.mark.parametrize("kv_heads", [{}, {0: 2}, {1: 2}, {2: 2}])
def test_all_heads_keep_the_same_rows(kv_heads: dict[int, int], tmp_path: Path) -> None:
    """In layers with other numbers of KV heads too. The rows that stay have the largest scores of all."""
    graph, source = llama(layers=3, kv_heads=kv_heads)
    result = placed(graph, source, tmp_path, "all").graph
    generator, values = torch.Generator().manual_seed(3), dict[str, Any]()
    for node in result.inputs():
        if "cache" in node.meta:
            values[node.name] = torch.randn(8, *node.meta["val"].shape[1:], generator=generator)
    values |= {node.name: weight_value(result.weights[node.name], source, 1) for node in result.weight_nodes()}
    values["compaction"] = torch.tensor([62, 32, 0, 62, 0, *range(8), *range(4)]).int()
    keys = [values[f"kv_cache_{i}_k"].transpose(1, 2).flatten(0, 1) for i in range(3)]
    before, largest = [k.clone() for k in keys], torch.full((62,), float("-inf"))
    for node in result.graph.find_nodes(op="call_function", target=torch.ops.llmc.score_expected.default):
        read: list[Any] = [values[each.name] if isinstance(each, fx.Node) else each for each in node.args]
        largest = torch.maximum(largest, score_expected(*read).view(-1, 64)[:, :62].amax(0))
    largest[-4:] = float("inf")
    GraphInterpreter(result.graph).run_readers("compaction", values)
    kept = largest.topk(32).indices.sort().values
    for layer, own in enumerate(before):
        after = values[f"kv_cache_{layer}_k"].transpose(1, 2).flatten(0, 1)
        assert torch.equal(after[:32], own[kept])


def test_kv_heads_without_one_in_each_layer_are_refused(tmp_path: Path) -> None:
    problem = "layer 0 has another number of KV heads (1) than layer 1 (2), and heads=kv_head joins those of one index"
    with pytest.raises(OptionError, match=re.escape(problem)):
        placed(*llama(layers=2, kv_heads={1: 2}), tmp_path, "kv_head")


def test_queries_without_means_are_refused() -> None:
    with pytest.raises(OptionError, match="layer 0 has queries without means"):
        run_pipeline(llama(layers=1)[0], PASSES, options(TRIATTENTION))


def test_keys_and_values_in_different_formats_are_refused() -> None:
    passes = compress_kv_cache, page_kv_cache, quantize_kv_cache, place_compaction
    given = BuildOptions(**vars(options(STREAMING)) | {"kv_cache": "int8/int4:head"})
    with pytest.raises(OptionError, match="keys and values in different formats, int8/int4:head"):
        run_pipeline(llama(layers=1)[0], passes, given)


def test_stopped_half_way_the_graph_still_runs() -> None:
    graph, source = llama(layers=2)
    for stop_after in range(9):
        cut = run_pipeline(graph, PASSES, BuildOptions(**vars(options(STREAMING)) | {"stop_after": stop_after})).graph
        torch.testing.assert_close(run_tokens(cut, source, TOKENS[:20]), run_tokens(graph, source, TOKENS[:20]))
    assert histogram(cut)["llmc.turn_rows"] == 2


def test_a_layer_alone_sees_what_stays_as_if_it_had_come_first() -> None:
    """Keys of one layer depend on their tokens and places alone."""
    graph, source = llama(layers=1)
    placed = run_pipeline(graph, PASSES, options(STREAMING)).graph
    logits = run_tokens(placed, source, TOKENS, block_size=8)
    for sizes in ((1,) * 60, (5,) * 12):
        torch.testing.assert_close(run_tokens(placed, source, TOKENS, chunk_sizes=sizes, block_size=8), logits)
    for position, seen in enumerate(CachePolicy.from_text(STREAMING).seen(len(TOKENS))):
        alone = run_tokens(graph, source, [TOKENS[place] for place in seen])
        torch.testing.assert_close(logits[position], alone[-1], atol=1e-5, rtol=1e-4)
