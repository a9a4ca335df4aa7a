"""The kernels that gather, multiply or combine rows: embedding, select_rows, head_linear and gated_activation."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.kernels.products.head_linear import head_linear
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.gated_activation import gated_activation
from llmc.codegen.triton.kernels.rows.select_rows import select_rows
from llmc.ops.activation import ACTIVATIONS
from tests.codegen.triton.tensor_call import check
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

DTYPES = list(GPU_KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (3, 64), (7, 2111)])
def test_embedding(device: str, tokens: int, channels: int, dtype: torch.dtype) -> None:
    ids = torch.randint(11, (tokens,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    check(embedding, ids, seeded_normal(0, 11, channels, deviation=2).to(dtype), device=device, tolerance=0.0)


def test_a_table_of_ids(device: str) -> None:
    table = torch.randint(2**30, (11, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    check(embedding, torch.tensor([7, 0, 10], dtype=torch.int32), table, device=device, tolerance=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_rows(device: str, dtype: torch.dtype) -> None:
    rows = torch.tensor([6, 0, 3], dtype=torch.int32)
    check(select_rows, seeded_normal(0, 7, 100, deviation=2).to(dtype), rows, device=device, tolerance=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "out", "channels"), [(1, 3, 16, 40), (35, 2, 70, 16), (3, 1, 1, 97)])
def test_head_linear(device: str, tokens: int, heads: int, out: int, channels: int, dtype: torch.dtype) -> None:
    x = seeded_normal(0, tokens, heads, channels, deviation=2).to(dtype)
    weight = seeded_normal(1, heads, out, channels).to(dtype)
    check(head_linear, x, weight, device=device, tolerance=GPU_KERNELS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(device: str, activation: str, dtype: torch.dtype) -> None:
    gate, up = seeded_normal(0, 3, 77, deviation=2).to(dtype), seeded_normal(1, 3, 77, deviation=2).to(dtype)
    for in_place in (False, True):
        check(gated_activation, gate, up, activation, device=device, tolerance=GPU_KERNELS[dtype], in_place=in_place)


def test_activations_at_their_limits(device: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        check(gated_activation, gate, torch.ones_like(gate), activation, device=device, tolerance=2e-6)


def test_gated_activation_of_long_rows(device: str) -> None:
    check(
        gated_activation,
        seeded_normal(0, 2, 2500, deviation=2),
        seeded_normal(1, 2, 2500, deviation=2),
        "silu",
        device=device,
        tolerance=2e-6,
    )
