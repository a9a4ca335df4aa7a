"""score_keys against SnapKV as it was published, and the rows that compact_kv keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.ops.compact_kv import best_rows, compact_kv
from llmc.ops.kv_write import kv_write
from llmc.ops.score_keys import window_scores
from llmc.program import COMPACTION_HEADER
from tests.codegen.cpp.kernels.test_row_choices import cached, row_bytes


def published(q: Tensor, k: Tensor, pool: int) -> Tensor:
    """SnapKV's scores of the keys before the window, per KV head, as kvpress 0.5.4 computes them."""
    window, heads, channels = q.shape
    keys, kv_heads, _ = k.shape
    logits = torch.matmul(q.transpose(0, 1), k.repeat_interleave(heads // kv_heads, 1).permute(1, 2, 0)) / channels**0.5
    mask = torch.full((window, keys), float("-inf")).triu(keys - window + 1)
    attention = (logits + mask).softmax(-1)[..., :-window]
    pooled = torch.nn.functional.avg_pool1d(attention.mean(-2)[None], pool, padding=pool // 2, stride=1)[0]
    return pooled.view(kv_heads, heads // kv_heads, -1).mean(1)


@pytest.mark.parametrize(("keys", "window", "pool"), [(70, 16, 5), (33, 32, 5), (90, 1, 1)])
def test_scores_are_those_that_were_published(keys: int, window: int, pool: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(window, 6, 8, generator=generator)
    k = torch.randn(keys, 3, 8, generator=generator)
    torch.testing.assert_close(window_scores(q, k, 8**-0.5, pool, None), published(q, k, pool))


def test_the_best_rows_stay_in_order_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor(
        [[0.0, 5.0, 1.0, 5.0, 2.0, 2.0, 2.0, 9.0, 9.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]]
    )
    assert best_rows(scores, 7, 4, sinks=1, recent=1).tolist() == [[0, 1, 3, 6], [0, 1, 2, 6]]
    # Scores of bf16 tie often: the choice is the same all the same.
    ties = torch.zeros(1, 40)
    assert best_rows(ties, 40, 12, sinks=2, recent=4).tolist() == [[*range(8), 36, 37, 38, 39]]


@pytest.mark.parametrize("format", [None, "int8", "int4:head", "fp8:g8"])
def test_rows_are_copied_as_they_are_stored(format: str | None) -> None:
    """To other blocks, and in place: what a head keeps is what it had in the chosen rows."""
    k, v, compaction, scores = cached(format, rows=29, kept=16)
    before = [cache.clone() for cache in (k, v)]
    compact_kv(k, v, scores, compaction, 16, 32, 2, 5, format)
    best = best_rows(scores.view(3, -1), 29, 16, 2, 5)
    blocks, places = (
        compaction[COMPACTION_HEADER : COMPACTION_HEADER + 4].tolist(),
        compaction[COMPACTION_HEADER + 4 : COMPACTION_HEADER + 6].tolist(),
    )
    for cache, old, width in ((k, before[0], 16), (v, before[1], 32)):
        for head in range(3):
            for to, row in enumerate(best[head].tolist()):
                kept = row_bytes(cache, places[to // 8], head, to % 8, width, format)
                assert torch.equal(kept, row_bytes(old, blocks[row // 8], head, row % 8, width, format))


def test_no_compaction_changes_nothing() -> None:
    k, v = torch.randn(3, 2, 8, 4), torch.randn(3, 2, 8, 4)
    before = k.clone(), v.clone()
    compact_kv(k, v, torch.zeros(1, 32), torch.zeros(0, dtype=torch.int32), 4, 4, 0, 1)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    kv_write(torch.ones(1, 2, 4), torch.ones(1, 2, 4), k, v, torch.tensor([5], dtype=torch.int32))
    assert k[0, :, 5].eq(1).all()
