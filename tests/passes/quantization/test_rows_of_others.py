"""Codes of matrices that are put together as those matrices are, and what may be done to them on the way."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.weights import Derived, Recipe, Stored, evaluate
from llmc.passes.quantization.rows_of_others import rows_of

aten = torch.ops.aten
NAMES = ("up0", "up1", "gate0", "gate1")
A, B, C, D = (Stored(name, torch.float32) for name in NAMES)
# [4, 6] each; codes have as many columns, scales two.
MATRICES = {name: torch.arange(24.0).view(4, 6) + 100 * i for i, name in enumerate(NAMES)}
PARTS = {
    f"{name}::{part}": matrix[:, :columns].contiguous()
    for name, matrix in MATRICES.items()
    for part, columns in (("codes", 6), ("scales", 2))
}


def call(target: OpOverload, *args: object) -> Recipe:
    return Derived(target, args)


STACK, CAT, RESHAPE = aten.stack.default, aten.cat.default, aten.reshape.default


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize(
    "recipe",
    [
        A,
        call(CAT, (A, B)),
        call(CAT, (A, C), -2),
        call(RESHAPE, call(STACK, (A, B)), (8, 6)),
        call(RESHAPE, call(CAT, (call(STACK, (A, B)), call(STACK, (C, D))), 1), (16, -1)),
        call(CAT, (call(RESHAPE, call(STACK, (A, B), 1), (8, 6)), C)),
    ],
)
def test_rows_are_put_together(recipe: Recipe, part: str) -> None:
    taken = rows_of(recipe, part, torch.float32)
    assert taken is not None
    whole = evaluate(recipe, MemorySource(MATRICES))
    columns = 6 if part == "codes" else 2
    assert torch.equal(evaluate(taken, MemorySource(PARTS)), whole[:, :columns])


@pytest.mark.parametrize(
    "recipe",
    [
        call(CAT, (A, B), 1),
        call(CAT, (A, B), -1),
        call(STACK, (A, B)),
        call(RESHAPE, call(STACK, (A, B), -1), (8, 6)),
        call(RESHAPE, call(STACK, (A, B)), (4, 2, 6)),
        call(aten.t.default, A),
        call(CAT, (A, call(aten.t.default, B))),
        call(RESHAPE, call(aten.t.default, A), (6, 4)),
        Derived(CAT, ((A, B),), (("dim", 0),)),
    ],
)
def test_anything_else_is_none(recipe: Recipe) -> None:
    assert rows_of(recipe, "codes", torch.float32) is None
