"""Paged attention over caches of codes whose newest rows are in other caches, as numbers, against the reference."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention, supports
from llmc.formats.cache_format import parse_cache_formats
from llmc.graph.refusal import Refusal
from llmc.program import TREE_REACH
from tests.codegen.cpp.paged_batch import SCORE_OPTIONS, PagedBatch, paged_batch
from tests.codegen.cpp.tree_batch import random_case, with_trees
from tests.codegen.triton.kernels.test_paged_attention import as_half
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample
from tests.tolerances import CODED_CACHES

# (context, queries): prompts, later chunks, decodes, drafted tokens, a request without tokens in this step.
MIXED = [(1, 1), (37, 37), (150, 20), (90, 0), (129, 2), (300, 1)]


def _check(batch: PagedBatch, device: str, target: str = "h100") -> None:
    check(paged_attention, *_arguments(batch), device=device, tolerance=CODED_CACHES[batch.q.dtype], target=target)


def _arguments(batch: PagedBatch) -> tuple[Any, ...]:
    newest = batch.newest
    assert newest is not None
    tensors = (batch.q, batch.k_cache, batch.v_cache, batch.query_starts, batch.context_lens, batch.block_tables)
    codes = (batch.scale, batch.window, batch.softcap, batch.sinks, str(batch.format), batch.value_dim)
    rest = (batch.tree_masks, batch.slopes, batch.chunk, batch.latent, None, None, batch.pinned)
    return (*tensors, *codes, *rest, newest.k_cache, newest.v_cache, newest.tables, newest.count, newest.lens)


@pytest.mark.parametrize("format", ["int8", "int4:g32", "int4:head", "fp8", "int8/int4:g32"])
@pytest.mark.parametrize("count", [1, 64, 200])
@pytest.mark.parametrize("dtype", quick_sample(list(CODED_CACHES), [torch.float16]))
def test_formats_and_counts(device: str, dtype: torch.dtype, format: str, count: int) -> None:
    """More newest rows than some contexts have, and than all of a chunk's queries see."""
    batch = paged_batch(MIXED, head_dim=64, value_dim=128, dtype=dtype)
    _check(batch.apart(parse_cache_formats(format), count), device)


@pytest.mark.parametrize(
    "options",
    [
        *SCORE_OPTIONS,
        {"heads": 12, "kv_heads": 2, "block_size": 8},
        {"heads": 5, "kv_heads": 1, "head_dim": 80, "value_dim": 96},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_limits_or_changes_scores_holds_in_both_caches(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    batch = paged_batch(MIXED, **{"head_dim": 32, "dtype": dtype, **options})
    _check(batch.apart(parse_cache_formats("int4:head"), 40), device)


@pytest.mark.parametrize("target", quick_sample(["a100", "b200", "l4", "mi300x"], ["b200", "mi300x"]))
def test_every_targets_tiles(device: str, target: str) -> None:
    if device == "cuda" and target == "mi300x":
        pytest.skip("its launches are not for this device")
    batch = paged_batch([*MIXED, (700, 300), (1300, 1)], head_dim=64, dtype=torch.float16)
    _check(batch.apart(parse_cache_formats("int8"), 130), device, target)


@pytest.mark.parametrize("format", ["int8", "int4:g8"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_newest_rows_are_found_from_the_end_behind_a_cut(device: str, format: str, blocks: int) -> None:
    """Some of the requests are too short to be cut."""
    batch = paged_batch([*MIXED, (400, 60)], head_dim=32, dtype=torch.float16).apart(parse_cache_formats(format), 25)
    cut = batch.behind_cut(blocks)
    assert (cut.context_lens < batch.context_lens).sum() >= 3
    _check(cut, device)


def test_newest_rows_may_be_narrower_than_queries(device: str) -> None:
    batch = paged_batch(MIXED, head_dim=32).apart(parse_cache_formats("int8"), 33, torch.float16)
    check(paged_attention, *_arguments(batch), device=device, tolerance=CODED_CACHES[torch.float32])


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_trees(device: str, seed: int) -> None:
    """Newest rows are counted without those that a tree hides."""
    batch, trees = random_case(seed)
    draw = random.Random(seed)
    format, count = parse_cache_formats(draw.choice(["int8:head", "int4:g8", "fp8:head"])), draw.choice([1, 5, 64, 90])
    if batch.chunk is not None:
        batch = replace(batch, pinned=None)
    if batch.pinned is not None and batch.window is not None:
        count = min(count, batch.window)
    _check(with_trees(as_half(batch).apart(format, count, slack=TREE_REACH), trees), device)


def test_a_prompt_has_the_same_bits_however_it_is_divided(device: str) -> None:
    """In the chunks that one launch serves: of two tokens or more. Without a device, BLAS multiplies, which on some
    CPUs adds up a row in another order in another place of a tile."""
    batch = paged_batch([(300, 200)], head_dim=32, dtype=torch.float16).apart(parse_cache_formats("int4:head"), 40)
    whole = _run(batch, device)
    roundings = 0 if device == "cuda" else 1
    for first, last in ((0, 2), (3, 60), (150, 200)):
        part, same = _run(batch.part(0, first, last), device), whole[first:last]
        assert ((part - same).abs() <= roundings * torch.finfo(same.dtype).eps * same.abs().clamp(min=1e-2)).all()


def _run(batch: PagedBatch, device: str) -> torch.Tensor:
    call = TensorCall(paged_attention, _arguments(batch), [batch.expected()], device, in_place=False)
    launch = call.candidates()[0]
    for step in (launch, *launch.then):
        call.run(step)
    return call.results[0].cpu()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"window": 7}, None),
        ({"window": 7, "pinned": 3}, "pinned rows between the window of 7 and the newest 8 would be in neither cache"),
        ({"chunk": 7, "pinned": 3}, "the newest rows are apart, and both a chunk and pinned rows say which are seen"),
        ({"cache_format": None, "value_dim": None}, "recent=8 needs caches of codes, and this one has none"),
        ({"recent": torch.float32}, "the cache is torch.float32 but q is torch.float16"),
        ({"recent": torch.float64}, "recent_k is torch.float64; GPU kernels know"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], reason: str | None) -> None:
    found = _refusal(dict(changes))
    assert found is None if reason is None else found is not None and reason in found.reason


def _refusal(changes: dict[str, Any]) -> Refusal | None:
    dtype = changes.pop("recent", torch.float16)
    cache = torch.empty(4, 2, 16, 66, dtype=torch.uint8)
    numbers, indices = torch.empty(4, 2, 16, 64, dtype=dtype), (torch.empty(3).int(), torch.empty(2).int())
    if "cache_format" in changes:
        cache = numbers
    graph, tables = fx.Graph(), torch.empty(2, 4).int()

    def operand(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("operand")
        node.meta["val"] = tensor
        return node

    tensors = (torch.empty(3, 8, 64, dtype=torch.float16), cache, cache, *indices, tables)
    named = {"cache_format": "int8", "value_dim": 64, "recent": 8, **changes}
    named |= {name: operand(numbers) for name in ("recent_k", "recent_v")} | {"recent_tables": operand(tables)}
    read = map(operand, tensors)
    node = graph.call_function(torch.ops.llmc.paged_attention.default, (*read, 0.125), named)
    return supports(node, gpu_target("h100"))
