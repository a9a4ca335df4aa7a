"""join_scores against TriAttention's choices of heads together, as they were published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.graph.op_record import RECORDS, OpCall
from llmc.ops.compact_kv import compact_kv
from llmc.ops.join_scores import join_scores
from llmc.ops.kv_write import write_slots
from llmc.ops.rope import rotate
from llmc.ops.score_expected import score_expected
from tests.ops.test_score_expected import (
    BLOCK,
    BLOCKS,
    CHANNELS,
    GROUP,
    INV_FREQ,
    KV_HEADS,
    LONGEST,
    means,
    published_by_head,
)

LAYERS = 3


def union(scores: Tensor, budget: int) -> Tensor:
    """The rows that all heads keep, [budget], as the authors' code chooses them without options.

    Each query head names its best rows, and of all these the ones with the largest scores stay.

    scores: Of query heads, [layers, heads, rows].
    """
    of_heads, largest = scores.flatten(0, 1), scores.amax((0, 1))
    named = torch.zeros(len(largest), dtype=torch.bool)
    named[of_heads.topk(budget).indices.flatten()] = True
    return largest.masked_fill(~named, float("-inf")).topk(budget).indices.sort().values


def per_head(scores: Tensor, budget: int) -> Tensor:
    """The rows that each KV head keeps in all layers, [kv_heads, budget], as with `per_head_pruning`."""
    of_layers = scores.view(len(scores), KV_HEADS, GROUP, -1).amax(2)
    return of_layers.mean(0).topk(budget).indices.sort(-1).values


@pytest.mark.parametrize("pinned", [0, 21], ids=["counted", "pinned"])
@pytest.mark.parametrize("across_heads", [True, False], ids=["all", "kv_head"])
def test_rows_that_stay_are_those_of_the_published_algorithm(across_heads: bool, pinned: int) -> None:
    """Of three layers, which are cut three times. All of them hold the same positions."""
    generator = torch.Generator().manual_seed(pinned)
    count, kept, sinks, recent = 120, 48, 2, 3
    shape = (LAYERS, count, KV_HEADS, CHANNELS)
    queries = torch.randn(LAYERS, 200, KV_HEADS * GROUP, CHANNELS, generator=generator)
    queries += torch.randn(LAYERS, 1, KV_HEADS * GROUP, CHANNELS, generator=generator)
    plain, angles = torch.randn(shape, generator=generator), torch.arange(count)[:, None] * INV_FREQ
    k = [rotate(keys, angles.cos(), angles.sin(), False) for keys in plain]
    v = torch.arange(count).float()[:, None, None].expand(shape[1:])
    caches = [[torch.zeros(BLOCKS, KV_HEADS, BLOCK, CHANNELS) for _ in range(2)] for _ in range(LAYERS)]
    table = torch.randperm(BLOCKS, generator=generator).tolist()
    held, done, chosen = torch.zeros(KV_HEADS, 0, dtype=torch.int64), 0, set[bool]()
    for end in (88, 104, 120):
        before, rows = held.shape[1], held.shape[1] + end - done
        held = torch.cat((held, torch.arange(done, end).expand(KV_HEADS, -1)), dim=1)
        slots = torch.tensor([table[row // BLOCK] * BLOCK + row % BLOCK for row in range(before, rows)])
        numbers = [rows, kept, 0, end, pinned, *table[: -(-rows // BLOCK)], *table[: kept // BLOCK]]
        compaction, joined = torch.tensor(numbers).int(), None
        for layer, (k_cache, v_cache) in enumerate(caches):
            write_slots(k[layer][done:end], k_cache, slots)
            write_slots(v[done:end], v_cache, slots)
            read = (compaction, means(queries[layer], len(INV_FREQ)), INV_FREQ, False, False)
            scores = score_expected(k_cache, *read, sinks, recent, LONGEST)
            heads = 1 if across_heads and layer < LAYERS - 1 else KV_HEADS
            joined = join_scores(scores, joined, compaction, LONGEST, heads, across_heads)
        assert joined is not None
        for k_cache, v_cache in caches:
            compact_kv(k_cache, v_cache, joined, compaction, CHANNELS, CHANNELS, sinks, recent)
        free = slice(max(sinks, pinned), rows - recent)
        expected = torch.stack([scores_of(queries[i], plain[i], held[:, free], end) for i in range(LAYERS)])
        best = (union if across_heads else per_head)(expected, kept - free.start - recent)
        rest = [*range(free.start)], [*range(rows - recent, rows)]
        keep = [[*rest[0], *(free.start + own).tolist(), *rest[1]] for own in best.expand(KV_HEADS, -1)]
        held = held.gather(1, torch.tensor(keep))
        chosen.add(held[0].tolist() == held[1].tolist())
        places = torch.arange(kept)
        for _, v_cache in caches:
            stored = v_cache[torch.tensor(table)[places // BLOCK], :, places % BLOCK, 0].T
            assert stored.tolist() == held.tolist()
        done = end
    assert chosen == {across_heads}, "KV heads keep the same rows only if they choose together"


def scores_of(queries: Tensor, plain: Tensor, positions: Tensor, now: int) -> Tensor:
    """Published scores by query head of the keys that each KV head holds at positions, [kv_heads, keys]."""
    found = list[Tensor]()
    for head, own in enumerate(positions):
        of_head = slice(head * GROUP, (head + 1) * GROUP)
        found.append(published_by_head(queries[:, of_head], plain[own, head : head + 1], own[None], now, INV_FREQ))
    return torch.cat(found)


def request(rows: int) -> Tensor:
    return torch.tensor([rows, 1, 0, rows, 0]).int()


def test_heads_of_all_layers_share_the_largest_score() -> None:
    """In layers with other numbers of KV heads too, and 0 stands behind the last row."""
    scores = torch.tensor([[1.0, -5, 9, 0, -4, 9]])
    before = join_scores(scores, None, request(2), 3, 1, True)
    assert before.tolist() == [[1, -4, 0]]
    joined = join_scores(torch.tensor([[-2.0, -3, 9]]), before, request(2), 3, 2, True)
    assert joined.tolist() == [[1, -3, 0, 1, -3, 0]]


def test_scores_of_one_head_add_up_over_layers() -> None:
    scores = torch.tensor([[1.0, -5, 9, 0, -4, 9]])
    before = join_scores(scores, None, request(2), 3, 2, False)
    assert before.tolist() == [[1, -5, 0, 0, -4, 0]]
    assert join_scores(scores, before, request(2), 3, 2, False).tolist() == [[2, -10, 0, 0, -8, 0]]


def test_no_compaction_joins_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    found = join_scores(torch.ones(1, 6), torch.ones(1, 3), none, 3, 2, True)
    assert found.shape == (1, 6) and not found.any()


@pytest.mark.parametrize(
    ("own", "before", "kv_heads", "across_heads", "problem"),
    [
        (7, None, 2, True, "scores [1, 7] are not those of rows with 3 numbers each"),
        (9, None, 2, False, "scores [1, 9] are not those of 2 heads, one for each of the result, with 3 numbers each"),
        (6, 6, 2, True, "scores [1, 6] of layers before are not [1, 3]"),
        (6, 3, 2, False, "scores [1, 3] of layers before are not [1, 6]"),
        (6, 3, 4, True, None),
        (6, 6, 2, False, None),
    ],
)
def test_shapes_are_checked(own: int, before: int | None, kv_heads: int, across_heads: bool, problem: Any) -> None:
    given = {"scores": torch.empty(1, own), "before": None if before is None else torch.empty(1, before)}
    sizes = {"longest": 3, "kv_heads": kv_heads, "across_heads": across_heads}
    check = RECORDS[torch.ops.llmc.join_scores.default].check
    assert check is not None and check(OpCall(given | sizes, None, {})) == problem
