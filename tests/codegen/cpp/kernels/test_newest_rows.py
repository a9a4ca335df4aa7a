"""paged_attention over caches of codes whose newest rows are apart, as numbers, against the op's reference."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmc.codegen.cpp.kernel_table import KERNELS
from llmc.formats.cache_format import parse_cache_formats
from llmc.graph.call_arguments import call_arguments
from llmc.ops.choose_keys import NO_PLACE
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernels.test_tree_attention import chain_of
from tests.codegen.cpp.paged_batch import SCORE_OPTIONS, paged_batch
from tests.codegen.cpp.runnable_targets import CODED
from tests.codegen.cpp.tree_batch import random_case, with_trees
from tests.passes.quantization.quantizing import optimized

targets = pytest.mark.parametrize("target", CODED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
formats = pytest.mark.parametrize("format_text", ["int8:head", "int4:g8", "fp8:g16", "int8/int4:g16", "int4:head"])
MIXED = [(1, 1), (37, 37), (150, 20), (64, 1), (90, 0), (129, 2), (65, 1)]


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


@targets
@dtypes
@formats
@pytest.mark.parametrize("count", [1, 20, 64, 200])
def test_equals_the_reference(target: CpuTarget, dtype: torch.dtype, format_text: str, count: int) -> None:
    shapes: list[dict[str, Any]] = [{"head_dim": 32}, {"head_dim": 64, "value_dim": 160, "block_size": 24}]
    for sizes in shapes:
        batch = paged_batch(MIXED, dtype=dtype, **sizes).apart(parse_cache_formats(format_text), count)
        tolerance = tolerance_of(dtype)
        torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@pytest.mark.parametrize(("activations", "cached"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_newest_rows_may_have_another_dtype(target: CpuTarget, activations: torch.dtype, cached: torch.dtype) -> None:
    batch = paged_batch(MIXED, head_dim=32, dtype=activations, cache_dtype=torch.float32)
    batch = batch.apart(parse_cache_formats("int4"), 33, cached)
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=1e-2, atol=1e-2)


@targets
@pytest.mark.parametrize(
    "options",
    [
        *SCORE_OPTIONS,
        {"window": 40, "pinned": 7},
        {"extent": 60, "token_sinks": True},
        {"chosen": 30},
        {"heads": 12, "kv_heads": 2, "block_size": 1},
    ],
    ids=str,
)
def test_what_limits_or_changes_scores_holds_in_both_caches(target: CpuTarget, options: dict[str, Any]) -> None:
    batch = paged_batch(MIXED, **{"head_dim": 32, **options}).apart(parse_cache_formats("int4"), 40)
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=1e-5, atol=1e-5)


@targets
@dtypes
@pytest.mark.parametrize("format_text", ["int8", "int4", "int8/int4"])
def test_long_contexts(target: CpuTarget, dtype: torch.dtype, format_text: str) -> None:
    requests, tolerance = [(2100, 1), (1030, 3), (70, 70), (1024, 1)], tolerance_of(dtype)
    for count in (128, 1100):
        batch = paged_batch(requests, head_dim=32, dtype=dtype).apart(parse_cache_formats(format_text), count)
        torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@dtypes
@pytest.mark.parametrize("format_text", ["int8", "int4", "int8/int4"])
@pytest.mark.parametrize("count", [20, 100])
def test_a_request_does_not_depend_on_how_it_is_cut(
    target: CpuTarget, dtype: torch.dtype, format_text: str, count: int
) -> None:
    batch = paged_batch([(1100, 30), (9, 9)], head_dim=32, dtype=dtype).apart(parse_cache_formats(format_text), count)
    whole = batch.run(target, threads=2)
    for first, last, threads in [(0, 1, 1), (7, 20, 3), (29, 30, 2)]:
        part = batch.part(0, first, last).run(target, threads)
        assert torch.equal(part, whole[first:last])


@targets
@dtypes
def test_contexts_without_older_rows_have_the_bits_of_a_cache_without_codes(
    target: CpuTarget, dtype: torch.dtype
) -> None:
    plain = paged_batch([(128, 128), (128, 1), (100, 3)], head_dim=32, dtype=dtype)
    assert torch.equal(plain.apart(parse_cache_formats("int4"), 128).run(target), plain.run(target))


@targets
@dtypes
@pytest.mark.parametrize("format_text", ["int8", "int4:g8", "int8/int4"])
def test_newest_rows_are_found_from_the_end_behind_a_cut(
    target: CpuTarget, dtype: torch.dtype, format_text: str
) -> None:
    """As if tokens saw all rows but those that have left. Some of the requests are too short to be cut."""
    requests = [(1, 1), (90, 37), (170, 20), (64, 1), (140, 1), (1300, 1), (1290, 40)]
    whole = paged_batch(requests, head_dim=32, dtype=dtype).apart(parse_cache_formats(format_text), 25)
    batch = whole.behind_cut(3)
    dropped = whole.context_lens - batch.context_lens
    assert dropped.unique().tolist() == [0, 48]
    chosen = torch.full((len(batch.q), 1300), NO_PLACE, dtype=torch.int32)
    tokens = [(r, place) for r, (context, count) in enumerate(requests) for place in range(context - count, context)]
    for own, (r, place) in zip(chosen, tokens, strict=True):
        own[: place + 1 - dropped[r]] = torch.arange(int(dropped[r]), place + 1)
    tolerance = tolerance_of(dtype)
    torch.testing.assert_close(
        batch.expected(), replace(whole, chosen=chosen).expected(), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))])
def test_nodes_of_trees_have_the_bits_of_their_path(target: CpuTarget, seed: int) -> None:
    batch, trees = random_case(seed)
    draw = random.Random(seed)
    format, count = parse_cache_formats(draw.choice(["int8:head", "int4:g8", "fp8:head"])), draw.choice([1, 5, 64, 90])
    if batch.chunk is not None:
        batch = replace(batch, pinned=None)
    if batch.pinned is not None and batch.window is not None:
        count = min(count, batch.window)
    actual = with_trees(batch.apart(format, count), trees).run(target)
    tolerance = 1e-2 if torch.bfloat16 in (batch.q.dtype, batch.k_cache.dtype) else 1e-5
    expected = with_trees(batch.apart(format, count), trees).expected()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for request, tree in trees.items():
        begin = int(batch.query_starts[request])
        for node in range(len(tree)):
            alone = chain_of(batch, request, tree, node).apart(format, count).run(target)
            assert torch.equal(actual[begin + 1 + node : begin + 2 + node], alone), (request, node)


@targets
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8, "pinned": 3}, None),
        ({"window": 7}, None),
        ({"window": 7, "pinned": 3}, "pinned rows between the window of 7 and the newest 8 would be in neither cache"),
        ({"chunk": 7, "pinned": 3}, "the newest rows are apart, and both a chunk and pinned rows say which are seen"),
    ],
    ids=str,
)
def test_rows_that_neither_cache_would_show_are_refused(
    target: CpuTarget, changes: dict[str, Any], reason: str | None
) -> None:
    graph = optimized("", kv_cache="int8:recent=8", max_model_len=64).graph
    node = next(iter(graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default)))
    node.args, node.kwargs = tuple((call_arguments(node) | changes).values()), {}
    refusal = KERNELS[node.target].refusal(node, target)
    assert (refusal and refusal.reason) == reason
