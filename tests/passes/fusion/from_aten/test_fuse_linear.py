"""Products and lookups become llmc ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.passes.canonical.fold_constants import fold_constants
from llmc.passes.canonical.normalize_ops import normalize_ops
from llmc.passes.fusion.from_aten.fuse_linear import fuse_embedding, fuse_linear
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def test_fuses_linear_addmm_and_matmul(golden: Golden) -> None:
    def body(x: Any, w1: Any, w2: Any, w3: Any, w4: Any, b: Any, table: Any, positions: Any) -> Any:
        x = aten.add.Tensor(x, aten.embedding.default(table, positions))
        x = aten.addmm.default(b, aten.linear.default(x, w1, b), w2)
        x = aten.matmul.default(aten.mm.default(x, w3), aten.t.default(w4))
        return x

    square = (WIDTH, WIDTH)
    made = PatternGraph(body, w1=square, w2=square, w3=square, w4=square, b=(WIDTH,), table=(64, WIDTH))
    text = rewritten(made, normalize_ops, fold_constants, fuse_linear, fuse_embedding)
    golden("passes/fuse_linear.txt", text)


def test_refuses_a_weight_that_is_not_a_matrix() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(x, aten.unsqueeze.default(aten.linear.default(x, weight), 1))

    assert refusals(PatternGraph(body, weight=(WIDTH,)), fuse_linear) == ["the weight is [8], expected a matrix"]


def test_refuses_one_bias_for_all_channels() -> None:
    def body(x: Any, weight: Any, bias: Any) -> Any:
        return aten.linear.default(x, weight, bias)

    made = PatternGraph(body, weight=(WIDTH, WIDTH), bias=(1,))
    assert refusals(made, fuse_linear) == ["the bias is [1], expected [8]"]


def test_refuses_ids_of_two_axes() -> None:
    def body(x: Any, table: Any, positions: Any) -> Any:
        rows = aten.embedding.default(table, aten.unsqueeze.default(positions, 0))
        return aten.add.Tensor(x, aten.squeeze.dim(rows, 0))

    (reason,) = refusals(PatternGraph(body, table=(64, WIDTH)), fuse_embedding)
    assert reason.startswith("the ids are [1, ")


def test_addmm_with_factors_stays() -> None:
    def body(x: Any, weight: Any, bias: Any) -> Any:
        return aten.addmm.default(bias, x, weight, beta=0.5)

    assert refusals(PatternGraph(body, weight=(WIDTH, WIDTH), bias=(WIDTH,)), normalize_ops) == []
