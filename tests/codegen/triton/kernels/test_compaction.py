"""The kernels that score and move rows, in every format of a cache, against the ops' references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.compaction.compact_kv import compact_kv
from llmc.codegen.triton.kernels.compaction.join_scores import join_scores
from llmc.codegen.triton.kernels.compaction.keep_sums import keep_sums
from llmc.codegen.triton.kernels.compaction.last_uses import last_uses
from llmc.codegen.triton.kernels.compaction.peak_attention import peak_attention
from llmc.codegen.triton.kernels.compaction.score_expected import score_expected
from llmc.codegen.triton.kernels.compaction.score_keys import score_keys
from llmc.codegen.triton.kernels.compaction.score_leverage import score_leverage
from llmc.codegen.triton.kernels.compaction.sum_attention import sum_attention
from llmc.codegen.triton.kernels.compaction.turn_rows import turn_rows
from llmc.ops.score_leverage import gaussian_sketch
from llmc.program import COMPACTION_HEADER
from tests.codegen.cpp.kernels.test_row_choices import BLOCK, FORMATS, KEYS, KV_HEADS, LONGEST, VALUES, cached
from tests.codegen.triton.tensor_call import check
from tests.gpu_target import gpu_target

SCORES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
LEVERAGES = {torch.float32: 1e-5, torch.float16: 5e-3}
EXPECTED = 1e-5
INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])
# A whole number of tiles and of blocks, a prime, a single block, and all rows that there may be.
SIZES = [(43, 24), (16, 8), (64, 56), (47, 40)]


def queries_of(dtype: torch.dtype, heads: int = 6, blocks: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(blocks)
    return torch.randn(2, blocks, heads, BLOCK, KEYS // 2, generator=generator).to(dtype)


def uses(blocks: int) -> Tensor:
    """Sums that are the same in all rows of a block."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(blocks, KV_HEADS, 1, 1, generator=generator).mul(5).expand(-1, -1, BLOCK, -1).contiguous()


@pytest.mark.parametrize("format", FORMATS)
@dtypes
def test_scores_of_a_window(device: str, dtype: torch.dtype, format: str | None) -> None:
    k, _, compaction, _ = cached(format, rows=43, kept=24, dtype=dtype)
    arguments = (*queries_of(dtype), k, compaction, 0.3, 5, 20.0, LONGEST, format)
    check(score_keys, *arguments, device=device, tolerance=SCORES[dtype])


@pytest.mark.parametrize(("heads", "queries", "pool"), [(3, 1, 1), (9, 13, 7), (12, 64, 5)])
def test_other_windows(device: str, heads: int, queries: int, pool: int) -> None:
    """One query head per KV head, groups that are not a power of two, and several tiles of queries."""
    k, _, compaction, _ = cached(None, rows=64, kept=24, queries=queries)
    q = queries_of(torch.float32, heads, blocks=9)
    check(score_keys, *q, k, compaction, 0.3, pool, None, LONGEST, None, device=device, tolerance=SCORES[torch.float32])


@pytest.mark.parametrize("format", FORMATS)
@dtypes
@pytest.mark.parametrize("template", [sum_attention, last_uses], ids=["sum_attention", "last_uses"])
def test_updates(device: str, template: KernelTemplate, dtype: torch.dtype, format: str | None) -> None:
    rows, queries = (43, 5) if template is sum_attention else (48, BLOCK)
    k, _, compaction, _ = cached(format, rows=rows, kept=24, queries=queries, dtype=dtype)
    arguments = (*queries_of(dtype), k, uses(k.shape[0]), compaction, 0.3, 20.0, LONGEST, format)
    check(template, *arguments, device=device, tolerance=SCORES[dtype])


@pytest.mark.parametrize("format", FORMATS)
@dtypes
def test_peaks_of_a_second_reading(device: str, dtype: torch.dtype, format: str | None) -> None:
    k, _, compaction, _ = cached(format, rows=43, kept=24, dtype=dtype, tokens=32)
    arguments = (*queries_of(dtype), k, uses(k.shape[0]) / 50, compaction, 0.3, 20.0, LONGEST, format)
    check(peak_attention, *arguments, device=device, tolerance=SCORES[dtype])


@pytest.mark.parametrize(("rows", "queries", "tokens"), [(61, 13, 48), (24, 0, 24)])
def test_other_peaks(device: str, rows: int, queries: int, tokens: int) -> None:
    """Whole blocks, and the beginning of a reading, where the numbers in the cache count for nothing."""
    k, _, compaction, _ = cached(None, rows=rows, kept=24, queries=queries, tokens=tokens)
    q = queries_of(torch.float32, blocks=9)
    arguments = (*q, k, uses(k.shape[0]) / 50, compaction, 0.3, None, LONGEST, None)
    check(peak_attention, *arguments, device=device, tolerance=SCORES[torch.float32])


def leverage_arguments(
    dtype: torch.dtype,
    format: str | None,
    *,
    heads: int = 6,
    rows: int = 43,
    kept: int = 24,
    queries: int = 13,
    sinks: int = 2,
    recent: int = 3,
    inv_freq: Tensor | None = INV_FREQ,
    interleaved: bool = False,
    is_spread: bool = False,
) -> tuple[Any, ...]:
    """Of llmc::score_leverage, for rows of which a cut has taken five."""
    k, v, compaction, _ = cached(format, rows, kept, queries, dtype)
    generator = torch.Generator().manual_seed(queries)
    attention = torch.rand(k.shape[0], KV_HEADS, BLOCK, 1, generator=generator)
    positions, before = torch.zeros_like(attention), rows - queries
    held = torch.arange(before) + 5 * (torch.arange(before) > 20)
    for row, position in enumerate(held.tolist()):
        positions[int(compaction[COMPACTION_HEADER + row // BLOCK]), :, row % BLOCK] = position
    caches = (*queries_of(dtype, heads, blocks=9), k, v, attention, positions, compaction, gaussian_sketch(KEYS))
    return (*caches, inv_freq, interleaved, is_spread, 0.3, 20.0, sinks, recent, VALUES, LONGEST, format)


@pytest.mark.parametrize("format", FORMATS)
@dtypes
def test_rows_that_stand_out(device: str, dtype: torch.dtype, format: str | None) -> None:
    check(score_leverage, *leverage_arguments(dtype, format), device=device, tolerance=LEVERAGES[dtype])


@pytest.mark.parametrize(
    "options",
    [
        {"interleaved": True},
        {"is_spread": True},
        {"inv_freq": None},
        {"rows": 40, "queries": 40, "sinks": 0, "recent": 1},
        {"rows": 40, "queries": 40, "sinks": 17},
        {"heads": 9, "queries": 32},
        {"rows": 56, "kept": 48, "queries": 16},
        {"rows": 40, "kept": 40, "queries": 16},
        {"rows": 8, "kept": 8, "queries": 8, "sinks": 8},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_other_rotations_and_chunks(device: str, options: dict[str, Any]) -> None:
    """Also a first chunk, sinks within a chunk, and chunks after which all rows stay."""
    arguments = leverage_arguments(torch.float32, "int8:g8", **options)
    check(score_leverage, *arguments, device=device, tolerance=LEVERAGES[torch.float32])


def expected_arguments(
    dtype: torch.dtype,
    format: str | None,
    *,
    heads: int = 6,
    rows: int = 43,
    tokens: int = 90,
    pinned: int = 0,
    sinks: int = 2,
    recent: int = 3,
    inv_freq: Tensor = INV_FREQ,
    interleaved: bool = False,
    is_spread: bool = False,
) -> tuple[Any, ...]:
    """Of llmc::score_expected."""
    k, _, compaction, _ = cached(format, rows, 24, 0, dtype, tokens=tokens, pinned=pinned)
    means = torch.randn(heads, KEYS + len(inv_freq), generator=torch.Generator().manual_seed(heads))
    return (k, compaction, means, inv_freq, interleaved, is_spread, sinks, recent, LONGEST, format)


@pytest.mark.parametrize("format", FORMATS)
@dtypes
def test_rows_that_later_queries_expect(device: str, dtype: torch.dtype, format: str | None) -> None:
    check(score_expected, *expected_arguments(dtype, format), device=device, tolerance=EXPECTED)


@pytest.mark.parametrize(
    "options",
    [
        {"interleaved": True},
        {"is_spread": True},
        {"inv_freq": torch.linspace(0.01, 1, KEYS // 2)},
        {"heads": 3},
        {"heads": 51, "rows": 64},
        {"tokens": 100_000},
        {"rows": 40, "sinks": 17, "recent": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_means_and_rows(device: str, options: dict[str, Any]) -> None:
    """Also all channels rotated, groups of one head and of more than a tile has, and positions behind 65536."""
    check(score_expected, *expected_arguments(torch.float32, "int8:g8", **options), device=device, tolerance=EXPECTED)


@pytest.mark.parametrize("pinned", [13, 40])
def test_pinned_rows_score_infinity(device: str, pinned: int) -> None:
    """The second time no other row may leave."""
    arguments = expected_arguments(torch.float32, None, pinned=pinned)
    check(score_expected, *arguments, device=device, tolerance=EXPECTED)
    scores = score_expected.op(*arguments).view(KV_HEADS, LONGEST)
    assert scores[:, :pinned].isinf().all() and not scores[:, pinned:].isinf().any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "across_heads"),
    [(1, 1, True), (3, 1, True), (3, 5, True), (1, 1, False), (3, 3, False)],
)
@pytest.mark.parametrize(("longest", "rows"), [(1, 1), (61, 47), (300, 300)])
def test_layers_join_their_scores(
    device: str, longest: int, rows: int, heads: int, kv_heads: int, across_heads: bool
) -> None:
    """Of the first layer and of a later one, among them scores of pinned rows."""
    generator = torch.Generator().manual_seed(longest)
    scores = torch.randn(1, heads * longest, generator=generator)
    before = torch.randn(1, (1 if across_heads else heads) * longest, generator=generator)
    for each in (scores, before):
        each.view(-1, longest)[:, : longest // 7] = float("inf")
    compaction = torch.tensor([rows, 1, 0, rows, longest // 7]).int()
    for others in (None, before):
        options = (compaction, longest, kv_heads, across_heads)
        check(join_scores, scores, others, *options, device=device, tolerance=0.0)


def test_rows_that_score_infinity_stay(device: str) -> None:
    k, v, compaction, scores = cached(None, 43, 24, pinned=13)
    scores.view(KV_HEADS, LONGEST)[:, :13] = float("inf")
    check(compact_kv, k, v, scores, compaction, KEYS, VALUES, 2, 3, device=device, tolerance=0.0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "kept"), SIZES)
def test_rows_are_moved(device: str, format: str | None, rows: int, kept: int) -> None:
    k, v, compaction, scores = cached(format, rows, kept)
    check(compact_kv, k, v, scores, compaction, KEYS, VALUES, 2, 3, format, device=device, tolerance=0.0)
    sums = uses(k.shape[0])
    for numbers in (None, scores.roll(1)):
        check(keep_sums, sums, scores, compaction, 2, 3, numbers, device=device, tolerance=0.0)


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, lambda n: -torch.rand(n), lambda n: torch.arange(n) % 3])
def test_scores_that_tie(device: str, make: Callable[[int], Tensor]) -> None:
    """Of equal ones the first stay; scores may be negative."""
    k, v, compaction, _ = cached(None, 61, 32)
    scores = make(KV_HEADS * LONGEST).float()[None]
    check(compact_kv, k, v, scores, compaction, KEYS, VALUES, 0, 1, device=device, tolerance=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_moved(device: str, dtype: torch.dtype) -> None:
    k, v, compaction, scores = cached(None, 43, 24, dtype=dtype)
    check(compact_kv, k, v, scores, compaction, KEYS, VALUES, 2, 3, device=device, tolerance=0.0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_turned(device: str, format: str | None, interleaved: bool) -> None:
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])
    for rows, kept, sinks in ((48, 24, 3), (64, 56, 0)):
        k, v, compaction, _ = cached(format, rows, kept, queries=0)
        arguments = (k, v, compaction, inv_freq, interleaved, sinks, KEYS, VALUES, format)
        # A product that is rounded the other way may end in the next code.
        check(turn_rows, *arguments, device=device, tolerance=1e-6 if format is None else 2e-2)


@pytest.mark.parametrize(
    ("op", "arguments", "reason"),
    [
        ("score_keys", (9, 300, None), "heads have 600 channels; the kernel takes 256 at most"),
        ("score_keys", (7, 8, None), "7 query heads do not divide among 3 KV heads"),
        ("score_keys", (6, 40, "int8:g32"), "groups of 32 channels do not fit half of a head of 80"),
        ("turn_rows", (6, 300, None), "heads have 600 channels; the kernel takes 256 at most"),
        ("turn_rows", (6, 40, "int8:g32"), "groups of 32 channels do not fit half of a head of 80"),
    ],
)
def test_refusals(op: str, arguments: tuple[int, int, str | None], reason: str) -> None:
    heads, half, format = arguments
    width, kind = (2 * half, torch.float32) if format is None else (100, torch.uint8)
    queries, cache = torch.empty(3, heads, 8, half), torch.empty(3, 3, 8, width, dtype=kind)
    numbers = torch.zeros(9, dtype=torch.int32)
    if op == "score_keys":
        given: tuple[Any, ...] = (queries, queries, cache, numbers, 0.3, 5, None, LONGEST, format)
        template = score_keys
    else:
        given = (cache, cache, numbers, torch.ones(4), False, 0, 2 * half, 2 * half, format)
        template = turn_rows
    graph, operands = fx.Graph(), []
    for index, value in enumerate(given):
        operands.append(value)
        if isinstance(value, Tensor):
            operands[-1] = graph.placeholder(f"operand{index}")
            operands[-1].meta["val"] = value
    found = template.supports(graph.call_function(template.op, tuple(operands)), gpu_target("h100"))
    assert found is not None and reason in found.reason
