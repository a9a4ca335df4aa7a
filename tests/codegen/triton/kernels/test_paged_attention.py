"""The paged attention kernels: every mix of prefill and decode, head layout, option and dtype gives the reference's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx

from llmc.codegen.triton.kernels.attention.paged_attention import decode_splits, paged_attention, supports
from llmc.graph.refusal import Refusal
from llmc.runtime.speculation.draft import Draft
from llmc.targets import GPU_TARGETS
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.cpp.tree_batch import random_case, with_trees
from tests.codegen.triton.tensor_call import TensorCall, check, relative_error
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample
from tests.tolerances import GPU_KERNELS

DTYPES = list(GPU_KERNELS)
# (context, queries): prompts, later chunks, decodes, drafted tokens, a request without tokens in this step.
MIXED = [(1, 1), (37, 37), (150, 20), (90, 0), (129, 2), (300, 1)]
DECODES = [(1, 1), (128, 1), (129, 1), (700, 1)]


def _check(batch: PagedBatch, device: str, target: str = "h100") -> None:
    check(paged_attention, *_arguments(batch), device=device, tolerance=GPU_KERNELS[batch.q.dtype], target=target)


def _arguments(batch: PagedBatch) -> tuple[Any, ...]:
    tensors = (batch.q, batch.k_cache, batch.v_cache, batch.query_starts, batch.context_lens, batch.block_tables)
    scoring = batch.scale, batch.window, batch.softcap, batch.sinks
    return (
        *tensors,
        *scoring,
        None,
        None,
        batch.tree_masks,
        batch.slopes,
        batch.chunk,
        batch.latent,
        None,
        None,
        batch.pinned,
    )


DIMENSIONS = [(1, 1), (7, 5), (64, 64), (80, 96), (128, 128), (97, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), quick_sample(DIMENSIONS, [(1, 1), (7, 5), (80, 96)]))
def test_dtypes_and_dimensions(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    _check(paged_batch(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype), device)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"), [(1, 1, 8), (6, 6, 24), (6, 2, 128), (5, 1, 24), (71, 1, 16), (4, 2, 8)]
)
def test_head_groups_and_block_sizes(device: str, heads: int, kv_heads: int, block_size: int) -> None:
    batch = paged_batch(MIXED, heads=heads, kv_heads=kv_heads, block_size=block_size, dtype=torch.float16)
    _check(batch, device)


LATENTS = [(*shape, dtype) for shape in [(64, 512, 5), (8, 16, 40), (32, 100, 1)] for dtype in DTYPES]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "dtype"), quick_sample(LATENTS, [(8, 16, 40, torch.float16)])
)
def test_values_that_are_keys_too(device: str, head_dim: int, value_dim: int, heads: int, dtype: torch.dtype) -> None:
    shape = partial(paged_batch, heads=heads, kv_heads=1, head_dim=head_dim, value_dim=value_dim)
    _check(shape(MIXED, dtype=dtype, latent=True), device)


QUICK = [(1, None, False), (64, 2.0, False), (1000, None, True), (None, 2.0, True), (64, None, True)]


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in product([None, 1, 64, 1000], [None, 2.0], [False, True])
    ],
)
def test_window_softcap_and_sinks(device: str, window: int | None, softcap: float | None, sinks: bool) -> None:
    _check(paged_batch(MIXED, window=window, softcap=softcap, sinks=sinks), device)


@pytest.mark.parametrize(
    ("chunk", "window", "softcap"),
    quick_sample([(None, None, None), (24, None, 2.0), (64, 10, None)], [(64, 10, None)]),
)
def test_slopes_and_chunks(device: str, chunk: int | None, window: int | None, softcap: float | None) -> None:
    _check(paged_batch(MIXED, chunk=chunk, window=window, softcap=softcap, slopes=True), device)


@pytest.mark.parametrize("target", quick_sample(["a100", "b200", "l4", "mi300x"], ["l4", "mi300x"]))
@pytest.mark.parametrize("requests", [DECODES, [(200, 200), (70, 3)], MIXED])
def test_every_targets_tiles(device: str, target: str, requests: list[tuple[int, int]]) -> None:
    _check(paged_batch(requests, head_dim=64, dtype=torch.float16, window=100, sinks=True), device, target)


def test_many_tiles_see_every_key_before_the_window_starts(device: str) -> None:
    _check(paged_batch([(700, 300), (513, 257)], window=400, dtype=torch.float16), device)


def test_scores_far_from_zero_do_not_overflow(device: str) -> None:
    batch = paged_batch(MIXED, softcap=30.0, sinks=True)
    batch.q.mul_(1e4)
    _check(batch, device)


def test_a_cache_narrower_than_the_queries(device: str) -> None:
    _check(paged_batch(MIXED, dtype=torch.float32, cache_dtype=torch.float16), device)


def test_blocks_behind_the_window_are_not_read(device: str) -> None:
    batch = paged_batch([(200, 3), (90, 1), (300, 200)], window=40)
    expected = batch.expected()
    for request, first_query in enumerate([197, 89, 100]):
        blocks = batch.block_tables[request, : (first_query + 1 - 40) // 16].long()
        batch.k_cache[blocks] = batch.v_cache[blocks] = float("nan")
    call = TensorCall(paged_attention, _arguments(batch), [expected], device, in_place=False)
    launch = call.candidates()[0]
    for step in (launch, *launch.then):
        call.run(step)
    assert relative_error(call.results[0], expected) <= GPU_KERNELS[torch.float32]


@pytest.mark.parametrize(
    ("pinned", "window", "chunk"),
    quick_sample([(1, 1, None), (4, 40, None), (100, 30, None), (40, None, 24), (1000, 10, None)], [(40, None, 24)]),
)
def test_pinned_keys(device: str, pinned: int, window: int | None, chunk: int | None) -> None:
    _check(paged_batch(MIXED, pinned=pinned, window=window, chunk=chunk, sinks=True), device)


@pytest.mark.parametrize("pinned", [4, 40])
def test_blocks_between_pinned_keys_and_the_window_are_not_read(device: str, pinned: int) -> None:
    batch = paged_batch([(200, 3), (90, 1), (300, 200)], pinned=pinned, window=40)
    expected, freed = batch.expected(), batch.without_freed_blocks()
    call = TensorCall(paged_attention, _arguments(freed), [expected], device, in_place=False)
    launch = call.candidates()[0]
    for step in (launch, *launch.then):
        call.run(step)
    assert relative_error(call.results[0], expected) <= GPU_KERNELS[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 40])
def test_a_cache_of_more_elements_than_32_bits_count(queries: int) -> None:
    blocks, kv_heads, block_size, dim = 2**31 // (8 * 16 * 128) + 64, 8, 16, 128
    k_cache = torch.zeros(blocks, kv_heads, block_size, dim, dtype=torch.float16)
    v_cache = torch.zeros_like(k_cache)
    tables = torch.arange(blocks - 12, blocks, dtype=torch.int32)[None]
    for cache in (k_cache, v_cache):
        cache[tables[0].long()] = torch.randn(12, kv_heads, block_size, dim).half()
    q = torch.randn(queries, 32, dim).half()
    lens = torch.tensor([180], dtype=torch.int32)
    starts = torch.tensor([0, queries], dtype=torch.int32)
    check(paged_attention, q, k_cache, v_cache, starts, lens, tables, dim**-0.5, device="cuda", tolerance=1e-3)


def test_splits_fill_the_device_and_leave_no_more_than_the_longest_sequence_needs() -> None:
    h100 = gpu_target("h100")
    assert decode_splits(h100, shares=8, max_model_len=131072, min_split=128) == 32
    assert decode_splits(h100, shares=1, max_model_len=131072, min_split=128) == 64
    assert decode_splits(h100, shares=8, max_model_len=300, min_split=128) == 4
    assert all(decode_splits(t, 1024, 4096, 128) == 1 for t in GPU_TARGETS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 320}, "head_dim is 320"),
        ({"dtype": torch.float64}, "q is torch.float64"),
        ({"cache_dtype": torch.float32}, "the cache is torch.float32 but q is torch.float16"),
        ({"heads": 9, "kv_heads": 2}, "9 query heads do not divide among 2 KV heads"),
        ({"heads": 71, "kv_heads": 1, "head_dim": 256}, "71 query heads share a KV head; with these dimensions"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    refused = _refusal(**change)
    assert refused is not None and reason in refused.reason


def test_ordinary_attention_is_supported() -> None:
    assert _refusal() is None


def _refusal(
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    cache_dtype: torch.dtype | None = None,
    scale: float = 0.125,
) -> Refusal | None:
    cache = torch.empty(4, kv_heads, 16, head_dim, dtype=cache_dtype or dtype)
    indices = (torch.empty(3).int(), torch.empty(2).int(), torch.empty(2, 4).int())
    graph = fx.Graph()
    operands = []
    for index, tensor in enumerate((torch.empty(3, heads, head_dim, dtype=dtype), cache, cache, *indices)):
        operands.append(graph.placeholder(f"operand{index}"))
        operands[-1].meta["val"] = tensor
    return supports(graph.call_function(torch.ops.llmc.paged_attention.default, (*operands, scale)), gpu_target("h100"))


@pytest.mark.parametrize("seed", range(4))
def test_trees(device: str, seed: int) -> None:
    batch, trees = random_case(seed)
    _check(with_trees(as_half(batch), trees), device)


def test_slopes_count_from_a_trees_places_before_its_rows(device: str) -> None:
    """In tiles that every query of a tree sees, and in pinned keys: what the tree hides lies between."""
    tree = Draft(tokens=[7, 46, 21, 39, 69], parents=[None, 0, 1, 2, None])
    for window, pinned in ((None, None), (30, 40)):
        batch = paged_batch(
            [(300, len(tree) + 1)],
            heads=9,
            kv_heads=3,
            dtype=torch.float16,
            slopes=True,
            window=window,
            pinned=pinned,
        )
        _check(with_trees(batch, {0: tree}), device)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_any_tree(device: str, seed: int) -> None:
    """Two trees each."""
    batch, trees = random_case(seed)
    _check(with_trees(as_half(batch), trees), device)


def as_half(batch: PagedBatch) -> PagedBatch:
    """In a dtype that the interpreter computes right."""
    q, k_cache, v_cache = (tensor.to(torch.float16) for tensor in (batch.q, batch.k_cache, batch.v_cache))
    return replace(batch, q=q, k_cache=k_cache, v_cache=v_cache)
