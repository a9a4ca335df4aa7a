"""KV caches of codes: what is written is what the reference writes, byte for byte, and attention reads it so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.codegen.triton.kernels.attention.kv_write import kv_write, supports
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.formats.cache_format import parse_cache_formats
from llmc.ops.cache_codes import read_codes, write_codes
from tests.codegen.cpp.paged_batch import paged_batch
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.gpu_target import gpu_target
from tests.seeded_normal import seeded_normal
from tests.tolerances import CODED_CACHES

MIXED = [(1, 1), (37, 37), (50, 20), (90, 0), (129, 2), (200, 1)]
FORMATS = ["int8", "int4:g32", "int4:head", "fp8", "int8:g16", "int8/int4:g32"]


def _cache(format: str, heads: int, dim: int, blocks: int = 3, block_size: int = 8, part: str = "k") -> Tensor:
    width = parse_cache_formats(format).of(part).position_bytes(dim)
    return torch.zeros(blocks, heads, block_size, width, dtype=torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_writing(device: str, format: str, dtype: torch.dtype) -> None:
    k, v = seeded_normal(0, 4, 3, 64).to(dtype), 3 * seeded_normal(1, 4, 3, 128).to(dtype)
    # Rounded to bf16, the least of these is more than all of them.
    k[1, 2], k[2, 0], slots = 0, 0.1003, torch.tensor([0, 9, 23, 5]).int()
    caches = (_cache(format, 3, 64), _cache(format, 3, 128, part="v"))
    check(kv_write, k, v, *caches, slots, format, device=device, tolerance=0.0)


@pytest.mark.parametrize("format", ["int8", "int4:head", "fp8"])
def test_writing_heads_of_no_power_of_two(device: str, format: str) -> None:
    k, v, slots = seeded_normal(0, 2, 3, 80), seeded_normal(1, 2, 3, 6), torch.tensor([1, 17]).int()
    check(
        kv_write,
        k,
        v,
        _cache(format, 3, 80),
        _cache(format, 3, 6, part="v"),
        slots,
        format,
        device=device,
        tolerance=0.0,
    )


@pytest.mark.parametrize("format", FORMATS)
def test_codes_do_not_hide_a_nan(device: str, format: str) -> None:
    k, v, slots = seeded_normal(0, 2, 3, 64), seeded_normal(1, 2, 3, 64), torch.tensor([1, 17]).int()
    k[1, 2, 63], v[0, 0, 40] = float("nan"), float("nan")
    arguments = (k, v, _cache(format, 3, 64), _cache(format, 3, 64, part="v"), slots, format)
    call = TensorCall(kv_write, arguments, (), device, False)
    (launch,) = call.candidates()
    call.run(launch)
    for name, values in (("k_cache", k), ("v_cache", v)):
        own = str(parse_cache_formats(format).of(name[0]))
        wanted = _cache(own, 3, 64)
        write_codes(values, wanted, slots, own)
        got = read_codes(call.memory["cache", name].cpu(), 64, own)
        assert got.isnan().any()
        torch.testing.assert_close(got, read_codes(wanted, 64, own), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("format", ["int8", "int4:g32", "int8/int4:g32"])
def test_turning_and_writing(device: str, format: str, rotary: int, interleaved: bool) -> None:
    q, k, v = seeded_normal(0, 4, 6, 64), seeded_normal(1, 4, 2, 64), seeded_normal(2, 4, 2, 64)
    angles = seeded_normal(3, 4, rotary // 2)
    arguments = (q, k, v, angles.cos(), angles.sin(), _cache(format, 2, 64), _cache(format, 2, 64, part="v"))
    slots = torch.tensor([0, 9, 23, 5]).int()
    # A sum rounded once less may fall on the other side of the middle between two codes.
    check(rope_kv_write, *arguments, slots, interleaved, format, device=device, tolerance=2e-2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (80, 96)])
def test_attention(device: str, format: str, head_dim: int, value_dim: int) -> None:
    if ":g" in format and head_dim == 80:
        format, value_dim = "int8:g8", 96
    for dtype in CODED_CACHES if head_dim == 64 else [torch.float16]:
        _attend(device, format, head_dim, value_dim, dtype)


@pytest.mark.parametrize("target", ["a100", "mi300x"])
def test_other_targets(device: str, target: str) -> None:
    if device == "cuda" and target == "mi300x":
        pytest.skip("its launches are not for this device")
    _attend(device, "int4:g32", 128, 128, torch.float16, target, window=40, sinks=True)


def _attend(
    device: str, format: str, head_dim: int, value_dim: int, dtype: torch.dtype, target: str = "h100", **options: Any
) -> None:
    batch = paged_batch(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **options)
    own = parse_cache_formats(format)
    caches = [_coded(cache.float(), str(own.of(part))) for part, cache in (("k", batch.k_cache), ("v", batch.v_cache))]
    indices = (batch.query_starts, batch.context_lens, batch.block_tables)
    extras = (batch.scale, batch.window, batch.softcap, batch.sinks, format, value_dim)
    check(
        paged_attention,
        batch.q,
        *caches,
        *indices,
        *extras,
        device=device,
        tolerance=CODED_CACHES[dtype],
        target=target,
    )


def _coded(numbers: Tensor, format: str) -> Tensor:
    """The cache of codes that holds a cache of numbers; those that nothing was written to are zeros."""
    blocks, heads, block_size, dim = numbers.shape
    cache = _cache(format, heads, dim, blocks, block_size)
    values = torch.nan_to_num(numbers).transpose(1, 2).reshape(blocks * block_size, heads, dim)
    write_codes(values, cache, torch.arange(blocks * block_size), format)
    return cache


@pytest.mark.parametrize(
    ("format", "dim", "reason"),
    [
        ("int8/int8:g32", 80, "groups of 32 channels do not fit half of a head of 80"),
        ("int8:g32", 80, "groups of 32 channels do not fit half of a head of 80"),
        ("int8", 7, "7 channels has no halves"),
    ],
)
def test_refusals(format: str, dim: int, reason: str) -> None:
    graph = fx.Graph()
    operands = []
    cache = torch.empty(3, 2, 8, 100, dtype=torch.uint8)
    for index, tensor in enumerate(
        (seeded_normal(0, 2, 2, dim), seeded_normal(0, 2, 2, dim), cache, cache, torch.zeros(2).int())
    ):
        operands.append(graph.placeholder(f"operand{index}"))
        operands[-1].meta["val"] = tensor
    found = supports(graph.call_function(torch.ops.llmc.kv_write.default, (*operands, format)), gpu_target("h100"))
    assert found is not None and reason in found.reason
