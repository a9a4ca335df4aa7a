"""Heads merged with the tokens come apart, through every kind of op that has a rule; other merged axes are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.options import BuildOptions
from llmc.passes.canonical.separate_heads import separate_heads
from llmc.passes.canonical.simplify_layout import simplify_layout
from llmc.passes.runner import run_pipeline
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, rewritten
from tests.passes.pass_checks import rewrites

aten = torch.ops.aten
HALF = WIDTH // 2


def test_norms_products_and_gates_of_heads(golden: Callable[[str, str], None]) -> None:
    def body(x: Any, norm: Any, matrix: Any) -> Any:
        heads = aten.reshape.default(x, [-1, 2, HALF])
        rows, gate = aten.reshape.default(heads, [-1, HALF]), aten.reshape.default(x, [-1, HALF])
        normed = aten.rms_norm.default(aten.linear.default(rows, matrix), [HALF], norm, 0.5)
        mean = aten.mean.dim(aten.mul.Tensor(normed, normed), [1], True)
        gated = aten.mul.Tensor(aten.add.Tensor(normed, mean), aten.sigmoid.default(gate))
        return aten.reshape.default(gated, [-1, WIDTH])

    text = rewritten(PatternGraph(body, norm=(HALF,), matrix=(HALF, HALF)), separate_heads, simplify_layout)
    assert f"float32[2*T, {HALF}]" not in text
    golden("passes/separate_heads.txt", text)


def test_different_numbers_of_heads_and_norms_across_them_are_left() -> None:
    def two_and_four(x: Any) -> Any:
        two = aten.sum.dim_IntList(aten.reshape.default(x, [-1, HALF]), [0], True)
        return aten.mul.Tensor(x, aten.reshape.default(aten.cat.default([two, two], 1), [1, WIDTH]))

    assert rewrites(run_pipeline(PatternGraph(two_and_four).graph, (separate_heads,), BuildOptions()).records) == 0
