"""Attention over a paged cache: same logits for one sequence and for several, and what cannot be paged is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmc.errors import PassError
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.options import BuildOptions
from llmc.passes.runner import run_pipeline
from llmc.passes.serving.page_kv_cache import page_kv_cache
from llmc.program import CachePolicy
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.graph_builder import GraphBuilder, TensorSource, llama
from tests.passes.pass_checks import histogram, rewrites, same_logits


def test_pages_every_attention(golden: Callable[[str, str], None]) -> None:
    graph, source = llama(layers=2)
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions())
    golden("passes/page_kv_cache.txt", render(result.graph))
    same_logits(graph, result.graph, source, tolerance=1e-6)
    assert [record.description for record in result.records[0].rewrites] == [
        "declare the inputs of a serving step",
        "page the cache of attention_default",
        "page the cache of attention_default_1",
    ]
    again = run_pipeline(result.graph, (page_kv_cache,), BuildOptions())
    assert rewrites(again.records) == 0


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_runs_when_cut_half_way(stop_after: int) -> None:
    graph, source = llama(layers=2)
    cut = run_pipeline(graph, (page_kv_cache,), BuildOptions(stop_after=stop_after)).graph
    assert histogram(cut).get("llmc.paged_attention", 0) == max(stop_after - 1, 0)
    tokens = [5, 3, 11, 2, 7]
    torch.testing.assert_close(run_tokens(cut, source, tokens), run_tokens(graph, source, tokens))


def test_keeps_window_softcap_and_sinks() -> None:
    graph, source = _windowed(3)
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions()).graph
    same_logits(graph, result, source, tolerance=1e-6)
    (node,) = result.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)
    assert [str(a) for a in node.args[6:10]] == ["0.5", "3", "2.0", "sinks"]


@pytest.mark.parametrize(("window", "kept"), [(31, 31), (32, None), (33, None)])
def test_a_window_as_long_as_the_longest_sequence_is_none(window: int, kept: int | None) -> None:
    graph, _ = _windowed(window)
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions(max_model_len=32)).graph
    assert [policy.visible.window for policy in result.policies] == ([] if kept is None else [kept])


@pytest.mark.parametrize("policy", [SinksAndRecent(3, 13), EveryOtherBlock(8, 4, 1)], ids=str)
def test_keeps_what_a_policy_says(policy: CachePolicy) -> None:
    graph, source = _windowed(None, str(policy))
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions(block_size=8)).graph
    assert result.policies == (policy,)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 5
    expected = run_tokens(graph, source, tokens)
    for sizes in ((60,), (1,) * 60, (5,) * 12):
        logits = run_tokens(result, source, tokens, chunk_sizes=sizes, block_size=8)
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("rows", "longest", "kept"),
    [(12, 64, ["sinks_and_recent:sinks=9,recent=13", "nearest:window=12"])]
    + [(rows, 64, ["sinks_and_recent:sinks=9,recent=13"]) for rows in (13, 16, 22, 64)]
    + [(12, 12, ["sinks_and_recent:sinks=9,recent=13"])],
)
def test_a_layer_without_older_rows_has_one_pair_of_caches(rows: int, longest: int, kept: list[str]) -> None:
    """If the newest rows include the window, a layer reads only these and pinned rows, and all of them stay exact."""
    graph, _ = _windowed(None, str(SinksAndRecent(9, 13)))
    options = BuildOptions(block_size=8, kv_cache=f"int8:recent={rows}", max_model_len=longest)
    result = run_pipeline(graph, (page_kv_cache,), options).graph
    assert [str(policy) for policy in result.policies] == kept
    assert len(result.caches) == len(kept)


@pytest.mark.parametrize("window", [0, -3])
def test_refuses_windows_in_which_nothing_is_seen(window: int) -> None:
    graph, _ = _windowed(window)
    with pytest.raises(PassError, match=f"a window of {window} tokens leaves nothing to see"):
        run_pipeline(graph, (page_kv_cache,), BuildOptions())


def test_cache_has_the_models_dtype_and_the_blocks_asked_for() -> None:
    graph, _ = llama(layers=1, dtype=torch.bfloat16)
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions(block_size=32)).graph
    assert result.caches[0].dtype is torch.bfloat16
    (cache,) = (n for n in result.inputs() if n.name == "kv_cache_0_v")
    assert cache.meta["val"].dtype is torch.bfloat16
    assert tuple(cache.meta["val"].shape[1:]) == (1, 32, 4)


def test_what_is_computed_from_positions_becomes_int32() -> None:
    b = GraphBuilder()
    shifted = b.call(torch.ops.aten.add.Tensor, b.positions, 2)
    table = b.weight("positions.weight", 32, 8)
    learned = b.call(torch.ops.llmc.embedding.default, shifted, table)
    graph, source = b.finish(b.call(torch.ops.aten.add.Tensor, b.embedded(), learned))
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions()).graph
    (add,) = (n for n in result.graph.nodes if n.name == shifted.name)
    assert add.meta["val"].dtype is torch.int32
    same_logits(graph, result, source, tolerance=1e-6)


def test_refuses_keys_that_are_not_the_steps_tokens() -> None:
    graph, _ = _cross_attention()
    with pytest.raises(PassError, match=r"k is float32\[5, 1, 8\], not one row for each") as caught:
        run_pipeline(graph, (page_kv_cache,), BuildOptions())
    assert caught.value.fix is not None
    assert "paged_attention" in caught.value.fix


def test_an_allowed_fallback_leaves_the_attention() -> None:
    graph, source = _cross_attention()
    result = run_pipeline(graph, (page_kv_cache,), BuildOptions(allow_fallback=("paged_attention",)))
    assert histogram(result.graph)["llmc.attention"] == 1
    assert len(result.records[0].refusals) == 1
    tokens = [5, 3, 11, 2, 7, 1]
    torch.testing.assert_close(run_tokens(result.graph, source, tokens), run_tokens(graph, source, tokens))


def _windowed(window: int | None, keeps: str | None = None) -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    h = b.embedded()
    q, k, v = (
        b.call(torch.ops.aten.reshape.default, b.linear(h, name, heads * 4), [-1, heads, 4])
        for name, heads in (("q", 2), ("k", 1), ("v", 1))
    )
    y = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5, window, 2.0, b.weight("sinks", 2), keeps=keeps)
    return b.finish(b.call(torch.ops.aten.reshape.default, y, [-1, 8]))


def _cross_attention() -> tuple[ModelGraph, TensorSource]:
    b = GraphBuilder()
    q = b.call(torch.ops.aten.reshape.default, b.embedded(), [-1, 1, 8])
    k, v = b.weight("keys", 5, 1, 8), b.weight("values", 5, 1, 8)
    y = b.call(torch.ops.llmc.attention.default, q, k, v, 0.5)
    return b.finish(b.call(torch.ops.aten.reshape.default, y, [-1, 8]))
