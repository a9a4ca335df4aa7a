"""Elements beyond 2³¹ from a tensor's start: a kernel that computes offsets in 32 bits reads or writes elsewhere.

Rows lie so far apart that the last one starts past the limit; tables and caches are that large.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.gated_activation import gated_activation
from llmc.codegen.triton.kernels.rows.layer_norm import add_layer_norm
from llmc.codegen.triton.kernels.rows.rms_norm import add_rms_norm
from llmc.codegen.triton.kernels.rows.rope import rope
from llmc.codegen.triton.kernels.rows.select_rows import select_rows
from llmc.codegen.triton.kernels.sampling.draw_rows import argmax_rows, draw_rows
from llmc.codegen.triton.kernels.sampling.row_masses import row_masses
from llmc.codegen.triton.kernels.sampling.top_k_rows import top_k_rows
from llmc.ops import sampling
from llmc.targets import GpuTarget, device_target
from tests.codegen.triton.claimed import normed
from tests.codegen.triton.tensor_call import TensorCall, check, relative_error
from tests.gpu_target import gpu_target
from tests.seeded_normal import seeded_normal

pytestmark = pytest.mark.gpu
_FAR = 2**30 + 16
_LIMIT = 2**31


def _half(*shape: int) -> Tensor:
    return seeded_normal(0, *shape).half()


def test_rows_far_apart() -> None:
    x, weight, q = _half(3, 64), _half(64), _half(3, 2, 32)
    angles = _half(3, 16).float()
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    check(add_rms_norm, x, x, weight, 1e-6, device="cuda", tolerance=1e-3, gap=_FAR)
    check(add_layer_norm, x, x, weight, weight, 1e-6, device="cuda", tolerance=1e-3, gap=_FAR)
    check(rope, q, angles, angles, False, device="cuda", tolerance=1e-3, gap=_FAR)
    check(gated_activation, x, x, "silu", device="cuda", tolerance=1e-3, gap=_FAR)
    check(select_rows, x, rows, device="cuda", tolerance=0.0, gap=_FAR)


def test_logits_far_apart() -> None:
    logits, ones, integers = _half(3, 97).float(), torch.ones(3), torch.arange(3, dtype=torch.int32)
    values, _ = sampling.top_k_rows(logits, 5)
    check(argmax_rows, logits, device="cuda", tolerance=0.0, gap=_FAR)
    check(draw_rows, logits, ones, integers, integers, device="cuda", tolerance=1e-5, gap=_FAR)
    check(top_k_rows, logits, 5, device="cuda", tolerance=0.0, gap=_FAR)
    check(row_masses, logits, values, ones, device="cuda", tolerance=1e-5, gap=_FAR)


def test_products_of_rows_far_apart() -> None:
    x, weight, gates, residual = _half(3, 64), _half(40, 64), _half(80, 64), _half(3, 40)
    check(fused_linear, x, weight, None, residual, "identity", 1.0, device="cuda", tolerance=1e-3, gap=_FAR)
    check(gated_linear, x, gates, None, "silu", device="cuda", tolerance=1e-3, gap=_FAR)
    x, weight, norm = x.bfloat16(), weight.bfloat16(), torch.ones(64).bfloat16()
    check(linear, normed(x, norm), weight, None, device="cuda", tolerance=1.5e-2, gap=_FAR)


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_a_large_cache(queries: int) -> None:
    attend_last_block(_LIMIT // (8 * 16 * 128) + 1, queries, "cuda")


def attend_last_block(blocks: int, queries: int, device: str) -> None:
    """One request, whose only block is the cache's last."""
    q, k, v = _half(queries, 8, 128), _half(1, 8, 16, 128), _half(1, 8, 16, 128) / 2
    caches = [torch.zeros(blocks, 8, 16, 128, dtype=torch.float16, device=device) for _ in range(2)]
    for cache, values in zip(caches, (k, v), strict=True):
        cache[-1] = values[0].to(device)
    starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, queries], [16]))
    first, last = (torch.tensor([[block]], dtype=torch.int32) for block in (0, blocks - 1))
    rest = (128**-0.5, None, None, None)
    wanted = torch.ops.llmc.paged_attention.default(q, k, v, starts, lens, first, *rest)
    call = TensorCall(paged_attention, (q, *caches, starts, lens, last, *rest), (wanted,), device, in_place=False)
    launch = paged_attention.candidates(call, _target() if device == "cuda" else gpu_target("h100"))[0]
    for step in (launch, *launch.then):
        call.run(step)
    assert relative_error(call.results[0], wanted) < 1e-3


def test_large_table() -> None:
    columns = 2**16
    table = torch.zeros(_LIMIT // columns + 2, columns, dtype=torch.float16)
    table[-2:] = _half(2, columns)
    ids = torch.tensor([len(table) - 1, 0, len(table) - 2], dtype=torch.int32)
    check(embedding, ids, table, device="cuda", tolerance=0.0)


@pytest.mark.parametrize("template", [kv_write, rope_kv_write])
def test_large_cache(template: KernelTemplate) -> None:
    blocks = _LIMIT // (8 * 16 * 128) + 1
    k, cache = _half(1, 8, 128), torch.zeros(blocks, 8, 16, 128, dtype=torch.float16, device="cuda")
    slots = torch.tensor([blocks * 16 - 1], dtype=torch.int32)
    still = torch.ones(1, 64), torch.zeros(1, 64)
    arguments = (k, k, cache, cache, slots) if template is kv_write else (k, k, k, *still, cache, cache, slots, False)
    call = TensorCall(template, arguments, () if template is kv_write else (k,), "cuda", in_place=False)
    (launch,) = template.candidates(call, _target())
    call.run(launch)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call.memory["cache", name][-1, :, -1].cpu(), k[0])


@pytest.mark.parametrize(("channels", "outputs"), [(2**16, 64), (64, 2**16)])
def test_large_products(channels: int, outputs: int) -> None:
    tokens = _LIMIT // 2**16 + 128
    x = torch.zeros(tokens, channels, dtype=torch.float16, device="cuda")
    x[-8:] = _half(8, channels).cuda()
    weight = _half(outputs, channels).cuda()
    expected = torch.empty(tokens, outputs, dtype=torch.float16, device="cuda")
    wanted = (x[-8:].double() @ weight.double().T).half().cpu()
    probe = TensorCall(linear, (x, weight, None), (expected,), "meta", in_place=False)
    for index, candidate in enumerate(linear.candidates(probe, _target())):
        if candidate.max_tokens is None:
            call = TensorCall(linear, (x, weight, None), (expected,), "cuda", in_place=False)
            call.run(linear.candidates(call, _target())[index])
            assert relative_error(call.results[0][-8:], wanted) < 1e-3, candidate.constants


def test_weight_beyond_the_limit() -> None:
    channels = 2**13
    outputs = _LIMIT // channels + 64
    weight = torch.zeros(outputs, channels, dtype=torch.float16, device="cuda")
    weight[-8:] = _half(8, channels).cuda()
    for tokens in (1, 3, 20, 300):
        x = _half(tokens, channels).cuda()
        wanted = (x.double() @ weight[-8:].double().T).half().cpu()
        call = TensorCall(
            linear, (x, weight, None), (torch.empty(tokens, outputs, dtype=torch.float16),), "cuda", in_place=False
        )
        launch = next(
            c
            for c in linear.candidates(call, _target())
            if c.min_tokens <= tokens and tokens <= (c.max_tokens or tokens) and not c.then
        )
        call.run(launch)
        assert relative_error(call.results[0][:, -8:], wanted) < 1e-3, launch.constants


def _target() -> GpuTarget:
    target = device_target()
    assert target is not None, "this device is none that llmc knows"
    return target
