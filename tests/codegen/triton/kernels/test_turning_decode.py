"""The decode that does the work of rope_kv_write too: it gives the results of the two ops, and leaves the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write as rope_kv_write_template
from llmc.ops.rope import rope_kv_write
from llmc.program.launch_arguments import Operand
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.triton.tensor_call import TensorCall, relative_error
from tests.codegen.triton.turning_launch import turning_launch
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

DECODES = [(1, 1), (16, 1), (129, 1), (300, 1), (701, 1)]
CASES = [
    (heads, kv_heads, head_dim, half, interleaved, dtype)
    for heads, kv_heads, head_dim, half in ((4, 2, 64, 32), (6, 6, 24, 12), (8, 1, 80, 20), (32, 8, 128, 64))
    for interleaved in (False, True)
    for dtype in GPU_KERNELS
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "interleaved", "dtype"),
    quick_sample(CASES, [(4, 2, 64, 32, False, torch.float16), (8, 1, 80, 20, True, torch.float32)]),
)
def test_results_are_those_of_two_ops(
    device: str, heads: int, kv_heads: int, head_dim: int, half: int, interleaved: bool, dtype: torch.dtype
) -> None:
    batch = paged_batch(DECODES, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, dtype=dtype)
    _check(batch, half, interleaved, device)


@pytest.mark.parametrize("options", [{"window": 50}, {"window": 50, "pinned": 7}, {"sinks": True, "softcap": 2.0}])
def test_other_attention(device: str, options: dict[str, Any]) -> None:
    _check(paged_batch(DECODES, head_dim=32, value_dim=48, dtype=torch.float16, **options), 16, False, device)


def test_requests_with_several_tokens_are_left_alone(device: str) -> None:
    """Neither their rows nor their results are written."""
    batch = paged_batch([(300, 1), (40, 3), (129, 1)], head_dim=32, value_dim=32, dtype=torch.float16)
    call, launch, before = _call(batch, _new_rows(batch), 16, False, device)
    call.run(launch)
    assert call.results[0][1:4].isnan().all()
    slots = _slots(batch)[1:4].long()
    for name, cache in before.items():
        rows = [tensor.cpu().transpose(1, 2).flatten(0, 1)[slots] for tensor in (call.memory["cache", name], cache)]
        assert torch.equal(*rows)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", GPU_KERNELS)
def test_bits_are_those_of_two_launches(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    """A step with a prompt has two: a decode's bits do not depend on it."""
    batch = paged_batch(DECODES, heads=6, kv_heads=2, head_dim=40, value_dim=40, dtype=dtype)
    rows, angles = _new_rows(batch), _angles(len(batch.q), 16)
    arguments = (*rows, *angles, batch.k_cache, batch.v_cache, _slots(batch), interleaved)
    first = TensorCall(rope_kv_write_template, arguments, [torch.empty_like(batch.q)], device, in_place=False)
    first.run(first.candidates()[0])
    caches = [first.memory["cache", name].cpu() for name in ("k_cache", "v_cache")]
    after = replace(batch, q=first.results[0].cpu(), k_cache=caches[0], v_cache=caches[1])
    second = TensorCall(paged_attention, _arguments(after), [batch.expected()], device, in_place=False)
    second.run(second.candidates()[0].then[-1])
    call, launch, _ = _call(batch, rows, 16, interleaved, device)
    call.run(launch)
    for got, same in zip(_left(call), (second.results[0], *caches), strict=True):
        assert torch.equal(got.cpu().nan_to_num(), same.cpu().nan_to_num())


def _check(batch: PagedBatch, half: int, interleaved: bool, device: str) -> None:
    rows = _new_rows(batch)
    caches = [batch.k_cache.clone(), batch.v_cache.clone()]
    (q, k, v), (cos, sin) = rows, _angles(len(batch.q), half)
    q = rope_kv_write(q, k, v, cos, sin, caches[0], caches[1], _slots(batch), interleaved)
    after = replace(batch, q=q, k_cache=caches[0], v_cache=caches[1])
    call, launch, _ = _call(batch, rows, half, interleaved, device)
    call.run(launch)
    call.check_written()
    tolerance = GPU_KERNELS[batch.q.dtype]
    for got, wanted in zip(_left(call), (after.expected(), *caches), strict=True):
        assert relative_error(got, wanted) <= tolerance


def _call(
    batch: PagedBatch, rows: Sequence[Tensor], half: int, interleaved: bool, device: str
) -> tuple[TensorCall, DeviceLaunch, dict[str, Tensor]]:
    """The launch on q, k and v as they are before they are rotated, and the caches before it."""
    q, k, v = rows
    call = TensorCall(paged_attention, _arguments(replace(batch, q=q)), [batch.expected()], device, in_place=False)
    (*_, decode) = call.candidates()[0].then
    cos, sin = _angles(len(q), half)
    given = {"k": k.flatten(1), "v": v.flatten(1), "cos": cos, "sin": sin, "slot_mapping": _slots(batch)}
    caches = {"k_cache": batch.k_cache, "v_cache": batch.v_cache}
    for name, cache in caches.items():
        call.give(Operand("cache", name), cache, is_written=True)
    return call, turning_launch(call, decode, given, half, interleaved), caches


def _new_rows(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (kv_heads, value_dim) = len(batch.q), (batch.v_cache.shape[1], batch.v_cache.shape[3])
    k = seeded_normal(1, tokens, kv_heads, batch.k_cache.shape[3]).to(batch.q.dtype)
    return batch.q, k, seeded_normal(2, tokens, kv_heads, value_dim).to(batch.q.dtype)


def _slots(batch: PagedBatch) -> Tensor:
    """Of each token, in the order of the requests."""
    size, slots = batch.k_cache.shape[2], []
    for table, context, queries in zip(
        batch.block_tables.tolist(), batch.context_lens.tolist(), batch.query_starts.diff().tolist(), strict=True
    ):
        slots += [table[row // size] * size + row % size for row in range(context - queries, context)]
    return torch.tensor(slots, dtype=torch.int32)


def _angles(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angles = seeded_normal(9, tokens, half) * 3
    return angles.cos(), angles.sin()


def _left(call: TensorCall) -> tuple[Tensor, ...]:
    return call.results[0], call.memory["cache", "k_cache"], call.memory["cache", "v_cache"]


def _arguments(batch: PagedBatch) -> tuple[Any, ...]:
    tensors = (batch.q, batch.k_cache, batch.v_cache, batch.query_starts, batch.context_lens, batch.block_tables)
    scoring = batch.scale, batch.window, batch.softcap, batch.sinks
    return (*tensors, *scoring, None, None, None, None, None, False, None, None, batch.pinned)
