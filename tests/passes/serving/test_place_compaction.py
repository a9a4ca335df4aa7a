"""Ops in front of cut tables: the graph that has them runs, in any chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmc.errors import OptionError
from llmc.graph.execute import run_tokens
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.attention.calibrate_queries import calibrate_queries
from llmc.passes.attention.compress_kv_cache import compress_kv_cache
from llmc.passes.model_data import ModelData
from llmc.passes.runner import run_pipeline
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.passes.serving.place_compaction import place_compaction
from llmc.program import CachePolicy
from tests.graph_builder import llama
from tests.passes.pass_checks import histogram, rewrites, same_logits
from tests.tiny_models import tiny_tokens

PASSES = compress_kv_cache, page_kv_cache, place_compaction
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 5
STREAMING = "streaming:budget=32,sinks=3,every=8"
H2O = "h2o:budget=32,recent=8,every=8"
COMPACTOR = "compactor:budget=32,sinks=2,recent=2,every=8,chunk=16"
LRU = "lru:budget=32,recent=8,every=8"
TRIATTENTION = "triattention:budget=32,recent=4,every=8"


def options(policy: str) -> BuildOptions:
    return BuildOptions(block_size=8, kv_compression=policy, max_model_len=64)


@pytest.mark.parametrize("policy", ["snapkv:budget=32,window=8,every=8", COMPACTOR, H2O, LRU, STREAMING])
def test_places_the_ops_of_every_layer(policy: str, golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=2)
    result = run_pipeline(graph, PASSES, options(policy))
    golden(f"passes/place_compaction_{policy.partition(':')[0]}.txt", render(result.graph))
    same_logits(graph, result.graph, source, tolerance=1e-6)
    assert rewrites(run_pipeline(result.graph, (place_compaction,), options(policy)).records) == 0


def test_scores_take_the_means_of_queries(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """The notes on queries end where scores read them; before, at every cut, the graph computes the same."""
    graph, source = llama(layers=2)
    text = tmp_path / "text.json"
    text.write_text(json.dumps([token % 17 for token in tiny_tokens(600)]))
    given = vars(options(TRIATTENTION)) | {"calibration": str(text), "calibration_length": 50}
    passes, data = (calibrate_queries, *PASSES), ModelData(source)
    result = run_pipeline(graph, passes, BuildOptions(**given), data=data)
    golden("passes/place_compaction_triattention.txt", render(result.graph))
    assert "llmc.query_means" not in histogram(result.graph)
    for stop_after in range(1, 11):
        cut = run_pipeline(graph, passes, BuildOptions(**given | {"stop_after": stop_after}), data=data).graph
        torch.testing.assert_close(run_tokens(cut, source, TOKENS[:20]), run_tokens(graph, source, TOKENS[:20]))
    assert rewrites(run_pipeline(result.graph, (place_compaction,), BuildOptions(**given), data=data).records) == 0


def test_queries_without_means_are_refused() -> None:
    with pytest.raises(OptionError, match="layer 0 has queries without means"):
        run_pipeline(llama(layers=1)[0], PASSES, options(TRIATTENTION))


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
