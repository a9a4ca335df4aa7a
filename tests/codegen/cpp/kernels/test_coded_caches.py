"""kv_write and paged_attention over caches of codes, against the ops' references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmc.codegen.cpp.cache_kernels import codes_of_pair
from llmc.formats.cache_format import CacheFormats, parse_cache_formats
from llmc.ops.cache_codes import read_codes
from llmc.ops.kv_write import kv_write
from llmc.ops.rope import rope_kv_write
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, pointer, rows
from tests.codegen.cpp.paged_batch import paged_batch
from tests.codegen.cpp.runnable_targets import CODED

targets = pytest.mark.parametrize("target", CODED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
FORMATS = ["int8", "int8:g16", "fp8", "fp8:g8", "int4:head", "int4:g32", "int4:g8", "int8/int4:g32", "int8:g8/int4:g16"]
MIXED = [(1, 1), (37, 37), (150, 20), (64, 1), (90, 0), (129, 2), (65, 1)]


def written(
    target: CpuTarget,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: list[torch.Tensor],
    slots: torch.Tensor,
    format: CacheFormats,
) -> dict[str, Any]:
    """Arguments without a rotation."""
    return {
        "tokens": k.shape[0],
        "kv_heads": k.shape[1],
        "head_dim": k.shape[2],
        "value_dim": v.shape[2],
        "block_size": caches[0].shape[2],
        "k": rows(k),
        "v": rows(v),
        "k_cache": pointer(caches[0]),
        "v_cache": pointer(caches[1]),
        "slot_mapping": pointer(slots),
        "cache_group": format.keys.group or 0,
        "value_group": format.values.group or 0,
    }


@targets
@dtypes
@pytest.mark.parametrize("format_text", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 32, 32, 8), (19, 3, 96, 64, 24), (50, 2, 160, 32, 16)], ids=str)
def test_the_bytes_are_the_reference_s(
    target: CpuTarget, dtype: torch.dtype, format_text: str, shape: tuple[int, int, int, int, int]
) -> None:
    tokens, heads, head_dim, value_dim, block_size = shape
    format = parse_cache_formats(format_text)
    torch.manual_seed(tokens)
    k, v = (torch.randn(tokens, heads * dim).to(dtype).unflatten(1, (heads, dim)) for dim in (head_dim, value_dim))
    # Rounded to bf16, the least of this is more than all of it.
    k[0], v[-1] = 0, 0.1003
    blocks = tokens // block_size + 2
    slots = torch.randperm(blocks * block_size)[:tokens].int()
    sizes = [format.keys.position_bytes(head_dim), format.values.position_bytes(value_dim)]
    expected, actual = ([torch.full((blocks, heads, block_size, n), 7, dtype=torch.uint8) for n in sizes] for _ in "12")
    kv_write(k, v, expected[0], expected[1], slots, str(format))
    call(target, "kv_write", [dtype, codes_of_pair(str(format))], written(target, k, v, actual, slots, format))
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@targets
@pytest.mark.parametrize("format_text", FORMATS)
def test_codes_do_not_hide_a_nan(target: CpuTarget, format_text: str) -> None:
    format = parse_cache_formats(format_text)
    k, v, slots = torch.randn(3, 2, 32), torch.randn(3, 2, 64), torch.tensor([1, 9, 4]).int()
    parts = [(32, format.keys), (64, format.values)]
    k[0, 1, 31], v[2, 0, 0] = float("nan"), float("nan")
    expected, actual = (
        [torch.zeros(2, 2, 8, each.position_bytes(dim), dtype=torch.uint8) for dim, each in parts] for _ in "12"
    )
    kv_write(k, v, expected[0], expected[1], slots, str(format))
    call(target, "kv_write", [torch.float32, codes_of_pair(str(format))], written(target, k, v, actual, slots, format))
    for (dim, own), of_reference, of_kernel in zip(parts, expected, actual, strict=True):
        wanted = read_codes(of_reference, dim, str(own))
        assert wanted.isnan().any()
        torch.testing.assert_close(read_codes(of_kernel, dim, str(own)), wanted, rtol=0, atol=0, equal_nan=True)


@targets
@dtypes
@pytest.mark.parametrize("format_text", FORMATS)
def test_keys_are_rotated_first(target: CpuTarget, dtype: torch.dtype, format_text: str) -> None:
    """Angles are rounded differently, so that a code may be the neighbour's."""
    format = parse_cache_formats(format_text)
    torch.manual_seed(0)
    q, k, v = (torch.randn(21, heads, 64).to(dtype) for heads in (4, 2, 2))
    angles = 100 * torch.rand(21, 24)
    slots = torch.randperm(48)[:21].int()
    expected, actual = (
        [torch.zeros(3, 2, 16, each.position_bytes(64), dtype=torch.uint8) for each in (format.keys, format.values)]
        for _ in "12"
    )
    rope_kv_write(q, k, v, angles.cos(), angles.sin(), expected[0], expected[1], slots, False, str(format))
    cos, sin, q_out = angles.cos(), angles.sin(), torch.empty_like(q)
    rotation = {"heads": 4, "half": 24, "q": rows(q), "q_out": rows(q_out), "cos": pointer(cos), "sin": pointer(sin)}
    values = written(target, k, v, actual, slots, format) | rotation
    call(target, "kv_write", [dtype, codes_of_pair(str(format))], values)
    a, b = (read_codes(cache, 64, str(format.keys)) for cache in (actual[0], expected[0]))
    largest = {"int8": 127, "int4": 7.5, "fp8": 16}[format.keys.codes]
    torch.testing.assert_close(a, b, rtol=0, atol=1.1 * k.abs().amax().item() * 1.5 / largest)
    assert (a != b).float().mean() < 0.02
    assert torch.equal(actual[1], expected[1])


@targets
@dtypes
@pytest.mark.parametrize("format_text", FORMATS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (64, 160), (96, 64)])
def test_attention_equals_the_reference(
    target: CpuTarget, dtype: torch.dtype, format_text: str, head_dim: int, value_dim: int
) -> None:
    batch = paged_batch(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype, cache_dtype=torch.float32)
    batch = batch.coded(parse_cache_formats(format_text))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@dtypes
@pytest.mark.parametrize(
    ("format_text", "head_dim", "value_dim"),
    [
        ("int8:g2", 36, 24),
        ("int4:g6", 36, 24),
        ("int4:head", 80, 80),
        ("int4:g16", 80, 48),
        ("fp8", 12, 6),
        ("int8:g2/int4:g6", 36, 24),
    ],
)
def test_heads_and_groups_that_do_not_divide_vectors(
    target: CpuTarget, dtype: torch.dtype, format_text: str, head_dim: int, value_dim: int
) -> None:
    requests = [(37, 37), (90, 1), (70, 9)]
    batch = paged_batch(requests, head_dim=head_dim, value_dim=value_dim, dtype=dtype, cache_dtype=torch.float32)
    batch = batch.coded(parse_cache_formats(format_text))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@dtypes
@pytest.mark.parametrize("format_text", ["int8", "int4", "int8/int4"])
def test_latents_that_are_keys_and_values(target: CpuTarget, dtype: torch.dtype, format_text: str) -> None:
    requests = [(200, 1), (70, 70)]
    batch = paged_batch(requests, kv_heads=1, head_dim=32, value_dim=64, latent=True, dtype=dtype)
    batch = batch.coded(parse_cache_formats(format_text))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(batch.run(target), batch.expected(), rtol=tolerance, atol=tolerance)


@targets
@pytest.mark.parametrize("format_text", ["int8", "int4", "fp8:g16", "int8/int4"])
def test_long_contexts_windows_and_many_heads(target: CpuTarget, format_text: str) -> None:
    requests = [(2100, 1), (1030, 3), (70, 70)]
    for options in ({"window": 900, "sinks": True}, {"softcap": 2.0, "heads": 12, "kv_heads": 2, "block_size": 24}):
        batch = paged_batch(requests, head_dim=32, **options)
        batch = batch.coded(parse_cache_formats(format_text))
        torch.testing.assert_close(batch.run(target), batch.expected(), rtol=1e-5, atol=1e-5)


@targets
@dtypes
@pytest.mark.parametrize("format_text", ["int8", "int4", "int8/int4"])
def test_a_request_does_not_depend_on_how_it_is_cut(target: CpuTarget, dtype: torch.dtype, format_text: str) -> None:
    batch = paged_batch([(1100, 30), (9, 9)], head_dim=32, dtype=dtype).coded(parse_cache_formats(format_text))
    whole = batch.run(target, threads=2)
    for first, last, threads in [(0, 1, 1), (7, 20, 3), (29, 30, 2)]:
        part = batch.part(0, first, last).run(target, threads)
        assert torch.equal(part, whole[first:last])
