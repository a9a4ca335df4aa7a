"""llmc_paged_attention: against its reference, and bit for bit the same however a request's work is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from llmc.targets import CpuTarget
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.quick_sample import quick_sample

DTYPES = [torch.float32, torch.bfloat16]
# (context, queries): prefill, a later chunk, decodes, a request without tokens in this step.
MIXED = [(1, 1), (37, 37), (150, 20), (64, 1), (90, 0), (129, 2), (65, 1)]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("extent", "window", "softcap"), [(1, None, None), (70, None, 2.0), (300, 30, None)])
def test_biases_and_sinks_of_each_token(
    target: CpuTarget, dtype: torch.dtype, extent: int, window: int | None, softcap: float | None
) -> None:
    batch = paged_batch(MIXED, dtype=dtype, extent=extent, token_sinks=True, window=window, softcap=softcap)
    _assert_equals_reference(batch, target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [1, 5, 90])
def test_chosen_keys(target: CpuTarget, dtype: torch.dtype, chosen: int) -> None:
    _assert_equals_reference(paged_batch(MIXED, dtype=dtype, chosen=chosen), target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 1), (7, 5), (16, 33), (64, 64), (80, 80), (97, 128)])
def test_dtypes_and_dimensions(
    target: CpuTarget, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    batch = paged_batch(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype, cache_dtype=cache_dtype)
    _assert_equals_reference(batch, target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (5, 1), (71, 1), (12, 4)])
@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_head_groups_and_block_sizes(
    target: CpuTarget, dtype: torch.dtype, heads: int, kv_heads: int, block_size: int
) -> None:
    batch = paged_batch(MIXED, heads=heads, kv_heads=kv_heads, block_size=block_size, dtype=dtype)
    _assert_equals_reference(batch, target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 13, 64, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_window_softcap_and_sinks(
    target: CpuTarget, dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool
) -> None:
    batch = paged_batch(MIXED, dtype=dtype, window=window, softcap=softcap, sinks=sinks)
    _assert_equals_reference(batch, target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "window"), [(None, None), (1, None), (24, None), (64, 10), (1000, None)])
@pytest.mark.parametrize(("slopes", "softcap"), [(False, None), (True, None), (True, 2.0)])
def test_slopes_and_chunks(
    target: CpuTarget, dtype: torch.dtype, chunk: int | None, window: int | None, slopes: bool, softcap: float | None
) -> None:
    batch = paged_batch(MIXED, dtype=dtype, chunk=chunk, window=window, slopes=slopes, softcap=softcap)
    _assert_equals_reference(batch, target)


PINNED: list[dict[str, Any]] = [
    {"pinned": 1, "window": 1},
    {"pinned": 4, "window": 13, "sinks": True},
    {"pinned": 40, "window": 30, "softcap": 2.0},
    {"pinned": 64, "window": 64},
    {"pinned": 3, "chunk": 24, "slopes": True},
    {"pinned": 70, "chunk": 64, "window": 10},
    {"pinned": 1000, "window": 10},
]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", PINNED, ids=str)
def test_pinned_keys(target: CpuTarget, dtype: torch.dtype, options: dict[str, Any]) -> None:
    _assert_equals_reference(paged_batch(MIXED, dtype=dtype, **options), target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("pinned", "window"), [(4, 40), (100, 500), (1100, 300), (20, 1500)])
def test_blocks_between_pinned_keys_and_the_window_are_not_read(target: CpuTarget, pinned: int, window: int) -> None:
    batch = paged_batch([(3000, 1), (2049, 3), (1024, 1), (70, 70)], pinned=pinned, window=window)
    torch.testing.assert_close(batch.without_freed_blocks().run(target), batch.expected(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim", "heads"), [(8, 16, 4), (2, 5, 3), (64, 512, 20), (32, 100, 128)])
def test_values_that_are_keys_too(
    target: CpuTarget, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_dim: int, heads: int
) -> None:
    shape = partial(paged_batch, heads=heads, kv_heads=1, head_dim=head_dim, value_dim=value_dim)
    _assert_equals_reference(shape(MIXED, dtype=dtype, cache_dtype=cache_dtype, latent=True), target)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("window", [None, 1500])
def test_long_contexts_are_split_and_joined(target: CpuTarget, window: int | None) -> None:
    batch = paged_batch([(3000, 1), (2049, 3), (1024, 1), (70, 70)], window=window, sinks=True, dtype=torch.bfloat16)
    _assert_equals_reference(batch, target)


@pytest.mark.parametrize("target", RUNNABLE)
def test_blocks_behind_the_window_are_not_read(target: CpuTarget) -> None:
    batch = paged_batch([(200, 3), (90, 1)], window=40)
    expected = batch.expected()
    freed = batch.block_tables.clone()
    freed[0, : (200 - 3 + 1 - 40) // 16] = 2**30
    freed[1, : (90 - 40) // 16] = 2**30
    batch.block_tables.copy_(freed)
    torch.testing.assert_close(batch.run(target), expected, rtol=2e-6, atol=2e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "chunk": {"chunk": 70, "slopes": True},
    "pinned": {"pinned": 70, "window": 100},
    "many pinned": {"pinned": 1050, "window": 90, "sinks": True},
    "latent": {"latent": True, "heads": 70, "kv_heads": 1},
    "bias": {"extent": 90, "token_sinks": True},
    "chosen": {"chosen": 200, "latent": True, "heads": 70, "kv_heads": 1},
}
# One dtype of each is quick, and both of the plainest.
CUT = [(name, dtype) for name in OPTIONS for dtype in DTYPES]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("name", "dtype"), quick_sample(CUT, [CUT[0], *CUT[1::4], *CUT[2::4]]))
def test_bits_do_not_depend_on_neighbours_chunks_or_threads(target: CpuTarget, name: str, dtype: torch.dtype) -> None:
    requests = [(1, 1), (2200, 3), (80, 80), (1100, 30), (2100, 1)]
    batch = paged_batch(requests, head_dim=24, dtype=dtype, **OPTIONS[name])
    together = batch.run(target, threads=2)
    assert torch.isfinite(together).all()
    for threads in (1, 3, 8):
        assert torch.equal(batch.run(target, threads), together)
    for request, tokens in enumerate(batch.query_starts.diff().tolist()):
        start = int(batch.query_starts[request])
        whole = together[start : start + tokens]
        assert torch.equal(batch.part(request, 0, tokens).run(target), whole)
        for step in (1, 7, 64):
            # Single tokens of a long prefill: the last ones are enough.
            begin = max(0, tokens - 20) if step == 1 else 0
            chunks = [batch.part(request, i, min(i + step, tokens)).run(target) for i in range(begin, tokens, step)]
            assert torch.equal(torch.cat(chunks), whole[begin:])


@pytest.mark.parametrize("target", RUNNABLE)
def test_great_scores_do_not_overflow(target: CpuTarget) -> None:
    batch = paged_batch([(100, 5)], head_dim=32)
    batch.q.mul_(1000.0)
    _assert_equals_reference(batch, target, tolerance=1e-4)


def _assert_equals_reference(batch: PagedBatch, target: CpuTarget, tolerance: float | None = None) -> None:
    dtypes = {batch.q.dtype, batch.k_cache.dtype}
    # The reference rounds a bf16 result once, as the kernel does: one ulp apart at most.
    tolerance = tolerance or (1e-2 if torch.bfloat16 in dtypes else 3e-6)
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)
