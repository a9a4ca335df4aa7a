"""Products of weights without their zeros: the reference's numbers, and the sums of the same tiles with the zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmc.codegen.triton.code_rows import code_rows
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear, lm_head
from llmc.codegen.triton.kernels.products.product import WITHOUT_MASKS
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.formats.code_format import TOKEN_GROUP
from llmc.program import Layout
from llmc.program.launch_arguments import Operand
from tests.codegen.triton.claimed import normed, rounded, values_of
from tests.codegen.triton.ptx_device import PtxDevice
from tests.codegen.triton.sparse_weight import SparseRows, sparse_code_rows, sparse_rows
from tests.codegen.triton.tensor_call import TensorCall, check, home_of, relative_error
from tests.gpu_target import gpu_target
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS, NORMED_CODES, NORMED_PRODUCTS

H100 = gpu_target("h100")


def _same_sums(template: KernelTemplate, weight: SparseRows, arguments: tuple[Any, ...], device: str) -> None:
    """Of every candidate that serves these rows: with the zeros stored, the same kernel in the same tiles gives the
    same result. Compiled, its threads hold other elements of a tile, and sum them in another order."""
    expected = (template.op(*values_of(arguments)),)
    tensors = TensorCall(template, arguments, expected, device, in_place=False)
    tokens = tensors.tokens
    candidates = tensors.candidates()
    for index, candidate in enumerate(candidates):
        if candidate.min_tokens > tokens or (candidate.max_tokens is not None and candidate.max_tokens < tokens):
            continue
        results = []
        for has_zeros in (False, True):
            call = TensorCall(template, arguments, expected, device, in_place=False)
            launch = call.candidates()[index]
            if has_zeros:
                dense = weight.dense if weight.scales is None else code_rows(weight.dense, Layout.CODE_ROWS)
                dtype = weight.dense.dtype if weight.scales is not None else arguments[0].dtype
                call.memory["weight", "dense"] = dense.to(dtype).contiguous().to(home_of(device))
            for step in (launch, *launch.then):
                call.run(_dense(step) if has_zeros else step)
            results.append(call.results[0].clone())
        tolerance = GPU_KERNELS[arguments[0].dtype] if isinstance(device, PtxDevice) else 0.0
        assert relative_error(*results) <= tolerance, f"{candidate.function} {candidate.constants}"


def _dense(launch: DeviceLaunch) -> DeviceLaunch:
    """The launch with the zeros stored, if it is the product's own."""
    name = next((n for n in ("codes_ptr", "weight_ptr") if n in launch.arguments), None)
    if name is None or launch.arguments.get("masks_ptr") is None:
        return launch
    return replace(launch, arguments={**launch.arguments, **WITHOUT_MASKS, name: Operand("weight", "dense")})


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(
    ("outputs", "channels"), [(13, 31), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, 1), (20, 1032)))]
)
def test_odd_shapes(device: str, outputs: int, channels: int, tokens: int) -> None:
    for dtype in (torch.float32, torch.float16):
        weight, x = sparse_rows(outputs, channels, 0.5, dtype), seeded_normal(tokens, tokens, channels).to(dtype)
        check(linear, x, weight.claimed(), None, dtype, device=device, tolerance=GPU_KERNELS[dtype])
        _same_sums(linear, weight, (x, weight.claimed(), None, dtype), device)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 70, 300])
@pytest.mark.parametrize("scheme", ["bitmask", "none", "int8"])
def test_every_row_count(device: str, tokens: int, scheme: str) -> None:
    x = seeded_normal(0, tokens, 384).half()
    weight = sparse_rows(136, 384, 0.6, x.dtype) if scheme == "bitmask" else sparse_code_rows(136, 384, 0.6, 128)
    arguments = (x if scheme == "bitmask" else rounded(x, scheme), weight.claimed(), None, x.dtype)
    check(linear, *arguments, device=device, tolerance=GPU_KERNELS[x.dtype])
    _same_sums(linear, weight, arguments, device)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    ("group", "x_format", "x_group"),
    [(32, "none", None), (None, "int8", TOKEN_GROUP), pytest.param(32, "int8", None, marks=pytest.mark.slow)],
)
def test_codes(device: str, group: int | None, x_format: str, x_group: int | None, tokens: int) -> None:
    weight, x = sparse_code_rows(24, 128, 0.5, group), seeded_normal(tokens, tokens, 128).half()
    arguments = (rounded(x, x_format, group=x_group), weight.claimed(), None, x.dtype)
    check(linear, *arguments, device=device, tolerance=GPU_KERNELS[x.dtype])
    _same_sums(linear, weight, arguments, device)


@pytest.mark.parametrize(
    ("has_codes", "tokens"),
    [(False, 9), (True, 1), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((False, 1), (True, 9)))],
)
def test_what_follows_the_sums(device: str, has_codes: bool, tokens: int) -> None:
    x, residual = seeded_normal(0, tokens, 70).half(), seeded_normal(3, tokens, 37).half()
    weight, gates = (
        sparse_code_rows(out, 70, 0.5, None) if has_codes else sparse_rows(out, 70, 0.5, x.dtype) for out in (37, 74)
    )
    fused = (x, weight.claimed(), seeded_normal(2, 37).half(), residual, "gelu_tanh", 0.5, x.dtype)
    gated = (x, gates.claimed(), seeded_normal(2, 74).half(), "silu", x.dtype)
    for template, stored, arguments in ((fused_linear, weight, fused), (gated_linear, gates, gated)):
        check(template, *arguments, device=device, tolerance=2e-3)
        _same_sums(template, stored, arguments, device)
    check(lm_head, x, weight.claimed(), device=device, tolerance=2e-6)
    _same_sums(lm_head, weight, (x, weight.claimed()), device)


@pytest.mark.parametrize("tokens", [1, 9])
def test_x_is_normed_on_the_way(device: str, tokens: int) -> None:
    x, norm = 3 * seeded_normal(0, tokens, 96), 1 + seeded_normal(1, 96) / 4
    weight, codes = sparse_rows(40, 96, 0.5), sparse_code_rows(40, 96, 0.5, None)
    check(linear, normed(x, norm), weight.claimed(), None, x.dtype, device=device, tolerance=NORMED_PRODUCTS[x.dtype])
    arguments = (rounded(normed(x, norm), "int8"), codes.claimed(), None, x.dtype)
    check(linear, *arguments, device=device, tolerance=NORMED_CODES[x.dtype])


@pytest.mark.parametrize("columns", [31, 1100])
def test_rows_are_looked_up(device: str, columns: int) -> None:
    ids = torch.tensor([0, 10, 3, 10], dtype=torch.int32)
    for weight in (sparse_rows(11, columns, 0.5), sparse_code_rows(11, columns, 0.5, None)):
        check(embedding, ids, weight.claimed(), torch.float16, device=device, tolerance=0.0)
