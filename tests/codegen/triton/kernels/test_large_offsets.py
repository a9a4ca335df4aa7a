"""Codes, argmax products and generated loops past element 2³¹, as test_index_width.py has the other kernels.

The same cases run interpreted with a small size: there it shows only that what is far from the start is found.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.products.linear import linear
from llmc.codegen.triton.kernels.products.product_best import best_gemv_kernel, best_narrow_kernel
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.printer import print_loop, print_module
from llmc.formats.cache_format import parse_cache_format
from llmc.ops.cache_codes import write_codes
from llmc.runtime.executors.triton_interpreter import allow_computed_bounds
from llmc.targets import device_target
from tests.codegen.cpp.test_printer import NORM
from tests.codegen.triton.quantized_weight import QuantizedWeight
from tests.codegen.triton.tensor_call import TensorCall, relative_error
from tests.gpu_target import gpu_target
from tests.seeded_normal import seeded_normal

SIZES = pytest.mark.parametrize(
    ("device", "limit"), [("cpu", 2**12), pytest.param("cuda", 2**31, marks=pytest.mark.gpu)]
)
FORMAT, KV_HEADS, BLOCK_SIZE, DIM = "int8", 8, 16, 128


@SIZES
@pytest.mark.parametrize("tokens", [1, 40])
def test_products_of_codes(device: str, limit: int, tokens: int) -> None:
    channels = _columns(limit)
    codes = _codes(limit, channels, device)
    x = _half(tokens, channels).to(device)
    weight = QuantizedWeight(codes, torch.ones(len(codes), 1, device=device), None, FORMAT)
    result = torch.empty(tokens, len(codes), dtype=torch.float16)
    call = TensorCall(linear, (x, weight.claimed()), (result,), device, in_place=False)
    _run_first(linear, call, tokens)
    wanted = (x.double() @ codes[-8:].double().T).half().cpu()
    assert relative_error(call.results[0][:, -8:], wanted) < 2e-3


@SIZES
def test_table_of_codes(device: str, limit: int) -> None:
    codes = _codes(limit, _columns(limit), device)
    ids = torch.tensor([len(codes) - 1, 0, len(codes) - 2], dtype=torch.int32)
    table = QuantizedWeight(codes, torch.ones(len(codes), 1), None, FORMAT)
    result = torch.empty(3, codes.shape[1], dtype=torch.float16)
    call = TensorCall(embedding, (ids, table.claimed(), torch.float16), (result,), device, in_place=False)
    _run_first(embedding, call, 3)
    assert torch.equal(call.results[0].cpu(), codes.cpu()[ids.long()].half())


@SIZES
def test_writing_into_a_large_cache_of_codes(device: str, limit: int) -> None:
    cache, k = _cache(limit, device), _half(1, KV_HEADS, DIM)
    wanted = torch.zeros(1, *cache.shape[1:], dtype=torch.uint8)
    write_codes(k, wanted, torch.tensor([BLOCK_SIZE - 1]), FORMAT)
    slots = torch.tensor([len(cache) * BLOCK_SIZE - 1], dtype=torch.int32)
    call = TensorCall(kv_write, (k, k, cache, cache, slots, FORMAT), (), device, in_place=False)
    _run_first(kv_write, call, 1)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call.memory["cache", name][-1].cpu(), wanted[0])


@SIZES
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_a_large_cache_of_codes(device: str, limit: int, queries: int) -> None:
    """One request, whose only block is the cache's last."""
    cache, q = _cache(limit, device), _half(queries, KV_HEADS, DIM)
    small = torch.zeros(1, *cache.shape[1:], dtype=torch.uint8)
    write_codes(_half(BLOCK_SIZE, KV_HEADS, DIM), small, torch.arange(BLOCK_SIZE), FORMAT)
    cache[-1] = small[0].to(device)
    starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, queries], [BLOCK_SIZE]))
    first, last = (torch.tensor([[block]], dtype=torch.int32) for block in (0, len(cache) - 1))
    rest = (DIM**-0.5, None, None, None, FORMAT, DIM)
    wanted = torch.ops.llmc.paged_attention.default(q, small, small, starts, lens, first, *rest)
    arguments = (q, cache, cache, starts, lens, last, *rest)
    call = TensorCall(paged_attention, arguments, (wanted,), device, in_place=False)
    _run_first(paged_attention, call, queries)
    assert relative_error(call.results[0], wanted) < 1e-3


@SIZES
@pytest.mark.parametrize("tokens", [2, 5])
def test_the_best_of_a_large_product(device: str, limit: int, tokens: int) -> None:
    """The likeliest token is the last one, whose row of W starts past the limit."""
    channels = _columns(limit)
    outputs, is_gemv = limit // channels + 64, tokens <= 4
    x = torch.ones(tokens, channels, dtype=torch.float16, device=device)
    weight = torch.zeros(outputs, channels, dtype=torch.float16, device=device)
    weight[-1] = 0.5
    block, blocks = (4, 8) if is_gemv else (64, 1)
    chunks = -(-outputs // (block * blocks))
    maxima = torch.zeros(tokens, chunks, device=device)
    places = torch.zeros(tokens, chunks, dtype=torch.int32, device=device)
    sizes = {"IN": channels, "OUT": outputs, "OUT_BLOCK": block, "IN_BLOCK": 64, "CHUNKS": chunks}
    arguments = (x, channels, weight, None, maxima, places, tokens)
    if device == "cpu":
        allow_computed_bounds()
    if is_gemv:
        best_gemv_kernel[chunks,](
            *arguments,
            **sizes,
            TOKENS=tokens,
            BLOCKS=blocks,
            AHEAD=channels % 64 == 0 and channels >= 128,
            LINES_AHEAD=0,
        )
    else:
        best_narrow_kernel[chunks, 1](*arguments, **sizes, TOKEN_BLOCK=16, LINES_AHEAD=0)
    best = maxima.argmax(1)
    assert (best == chunks - 1).all()
    assert (places[:, -1] == outputs - 1).all()
    torch.testing.assert_close(maxima[:, -1].cpu(), torch.full((tokens,), channels / 2.0))


@SIZES
def test_a_generated_loop(device: str, limit: int, tmp_path: Path) -> None:
    """A norm per head, four of sixteen channels, of rows that lie 192 elements apart."""
    file = tmp_path / "loops.py"
    file.write_text(print_module("tiny", [print_loop("loop_0_norm", NORM, "a norm")]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("large_offset_loops", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = limit // 192 + 37
    x = torch.zeros(rows, 192, dtype=torch.bfloat16, device=device)
    x[-1] = _half(192).to(device)
    weight, y = _half(16).float(), torch.full((rows, 64), float("nan"), dtype=torch.bfloat16, device=device)
    if device == "cpu":
        allow_computed_bounds()
    module.loop_0_norm[-(-rows * 4 // 16),](x, weight.to(device), y, rows)
    heads = x[-1, :64].float().cpu().view(4, 16)
    wanted = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(y[-1].float().cpu().view(4, 16), wanted, rtol=2**-7, atol=1e-3)


def _columns(limit: int) -> int:
    return 2**13 if limit > 2**20 else 64


def _codes(limit: int, columns: int, device: str) -> Tensor:
    """Zeros but for the last eight rows, of which the very last lie past the limit."""
    codes = torch.zeros(limit // columns + 64, columns, dtype=torch.int8, device=device)
    numbers = torch.randint(-127, 128, (8, columns), generator=torch.Generator().manual_seed(1))
    codes[-8:] = numbers.to(device, torch.int8)
    return codes


def _cache(limit: int, device: str) -> Tensor:
    width = parse_cache_format(FORMAT).position_bytes(DIM)
    blocks = limit // (KV_HEADS * BLOCK_SIZE * width) + 2
    return torch.zeros(blocks, KV_HEADS, BLOCK_SIZE, width, dtype=torch.uint8, device=device)


def _run_first(template: KernelTemplate, call: TensorCall, tokens: int) -> None:
    """The first candidate that serves so many rows."""
    target = device_target() if torch.cuda.is_available() else gpu_target("h100")
    assert target is not None, "this device is none that llmc knows"
    launch = next(
        c
        for c in template.candidates(call, target)
        if c.min_tokens <= tokens and (c.max_tokens is None or tokens <= c.max_tokens)
    )
    for step in (launch, *launch.then):
        call.run(step)


def _half(*shape: int) -> Tensor:
    return seeded_normal(0, *shape).half()
