"""The cache in another dtype: rounded as little as that dtype does, layer by layer."""

from __future__ import annotations

import pytest
import torch

from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.runner import PipelineResult, run_pipeline
from llmc.passes.serving.cast_kv_cache import cast_kv_cache
from llmc.passes.serving.page_kv_cache import page_kv_cache
from tests.graph_builder import llama
from tests.passes.pass_checks import rewrites

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_bf16_under_fp32_rounds_keys_and_values() -> None:
    graph, source = llama(layers=2)
    result = _served(graph, BuildOptions(kv_dtype="bfloat16"))
    assert [c.dtype for c in result.graph.caches] == [torch.bfloat16] * 2
    assert _cache_dtypes(result.graph) == {torch.bfloat16}
    wanted = run_tokens(graph, source, TOKENS)
    difference = float((run_tokens(result.graph, source, TOKENS) - wanted).abs().max() / wanted.std())
    assert 0 < difference < 0.02
    again = run_pipeline(result.graph, (cast_kv_cache,), BuildOptions(kv_dtype="bfloat16"))
    assert rewrites(again.records) == 0


def test_fp32_under_bf16_changes_nothing_that_is_computed() -> None:
    graph, source = llama(layers=1, dtype=torch.bfloat16)
    result = _served(graph, BuildOptions(kv_dtype="float32"))
    assert _cache_dtypes(result.graph) == {torch.float32}
    torch.testing.assert_close(run_tokens(result.graph, source, TOKENS), run_tokens(graph, source, TOKENS))


@pytest.mark.parametrize("kv_dtype", ["auto", "float32"])
def test_leaves_caches_that_have_the_dtype(kv_dtype: str) -> None:
    graph, _ = llama(layers=1)
    result = _served(graph, BuildOptions.model_validate({"kv_dtype": kv_dtype}))
    assert rewrites(result.records[1:]) == 0
    assert _cache_dtypes(result.graph) == {torch.float32}


def test_cut_between_layers_it_runs() -> None:
    graph, source = llama(layers=2)
    served = run_pipeline(graph, (page_kv_cache,), BuildOptions())
    cut = run_pipeline(served.graph, (cast_kv_cache,), BuildOptions(kv_dtype="bfloat16", stop_after=1)).graph
    assert [c.dtype for c in cut.caches] == [torch.bfloat16, torch.float32]
    wanted = run_tokens(graph, source, TOKENS)
    assert float((run_tokens(cut, source, TOKENS) - wanted).abs().max() / wanted.std()) < 0.02


def _served(graph: ModelGraph, options: BuildOptions) -> PipelineResult:
    return run_pipeline(graph, (page_kv_cache, cast_kv_cache), options)


def _cache_dtypes(graph: ModelGraph) -> set[torch.dtype]:
    return {n.meta["val"].dtype for n in graph.inputs() if "cache" in n.meta}
