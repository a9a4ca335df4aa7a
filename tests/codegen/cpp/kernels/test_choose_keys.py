"""The keys that an indexer chooses, against the reference: ragged batches, trees, fewer keys than may be chosen."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmc.ops.choose_keys import NO_PLACE, paged_choose_keys
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.cpp.runnable_targets import RUNNABLE

REQUESTS = [(1, 1), (70, 5), (40, 40), (90, 1)]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 12, 64])
def test_the_best_keys_are_chosen(target: CpuTarget, dtype: torch.dtype, count: int) -> None:
    batch = _batch(dtype)
    chosen = _choose(target, batch, count, threads=2)
    assert torch.equal(chosen, _expected(batch, count))
    assert torch.equal(chosen, _choose(target, batch, count, threads=3))
    # The third request reads its text from the beginning: its first token sees itself alone.
    assert chosen[6].tolist() == [0] + [NO_PLACE] * (count - 1)


@pytest.mark.parametrize("target", RUNNABLE)
def test_what_a_tree_hides_is_not_chosen(target: CpuTarget) -> None:
    batch = _batch(torch.float32)
    masks = torch.zeros(batch.q.shape[0], dtype=torch.int64)
    masks[3], masks[5] = 0b10, 0b110
    batch = replace(batch, tree_masks=masks)
    assert torch.equal(_choose(target, batch, 9, threads=2), _expected(batch, 9))


@pytest.mark.parametrize("target", RUNNABLE)
def test_of_equal_scores_the_first_is_chosen(target: CpuTarget) -> None:
    batch = _batch(torch.float32)
    batch.q.zero_()
    chosen = _choose(target, batch, 3, threads=2)
    assert torch.equal(chosen, _expected(batch, 3)) and chosen[-1].tolist() == [0, 1, 2]


def _batch(dtype: torch.dtype) -> PagedBatch:
    return paged_batch(REQUESTS, heads=5, kv_heads=1, head_dim=6, value_dim=10, latent=True, dtype=dtype)


def _weights(batch: PagedBatch) -> Tensor:
    return torch.randn(batch.q.shape[:2], generator=torch.Generator().manual_seed(3))


def _expected(batch: PagedBatch, count: int) -> Tensor:
    caches = batch.k_cache, batch.v_cache
    step = batch.query_starts, batch.context_lens, batch.block_tables
    return paged_choose_keys(batch.q, _weights(batch), *caches, *step, count, batch.tree_masks)


def _choose(target: CpuTarget, batch: PagedBatch, count: int, threads: int) -> Tensor:
    y, weights = torch.empty(batch.q.shape[0], count, dtype=torch.int32), _weights(batch)
    scores = torch.empty(batch.q.shape[0], count)
    names = ("query_starts", "context_lens", "block_tables", "tree_masks", "k_cache", "v_cache")
    values = {name: pointer(getattr(batch, name)) for name in names} | {
        "tokens": batch.q.shape[0],
        "requests": len(batch.context_lens),
        "heads": batch.q.shape[1],
        "head_dim": batch.q.shape[2],
        "half": batch.k_cache.shape[3],
        "block_size": batch.k_cache.shape[2],
        "q": rows(batch.q),
        "weights": pointer(weights),
        "max_blocks": batch.block_tables.shape[1],
        "count": count,
        "scores": pointer(scores),
        "y": rows(y),
    }
    call(target, "paged_choose_keys", [batch.q.dtype, batch.k_cache.dtype], values, threads=threads)
    return y
