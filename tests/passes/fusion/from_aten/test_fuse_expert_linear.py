"""All experts' products over all tokens, as Llama 4 computes its mixtures, become products of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.options import BuildOptions
from llmc.passes.canonical.normalize_routing import normalize_routing
from llmc.passes.canonical.separate_repeats import separate_repeats
from llmc.passes.canonical.simplify_layout import simplify_layout
from llmc.passes.fusion.from_aten.fuse_expert_linear import fuse_expert_linear
from llmc.passes.runner import run_pipeline
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, count, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]
EXPERTS = 3


def every_expert(x: Any, router: Any, up: Any, down: Any) -> Any:
    logits = aten.matmul.default(x, router)
    largest = aten.topk.default(logits, 2)
    hidden = aten.full_like.default(logits, float("-inf"))
    scores = aten.sigmoid.default(aten.scatter.src(hidden, 1, largest[1], largest[0]))
    by_expert = aten.reshape.default(aten.transpose.int(scores, 0, 1), [-1, 1])
    routed = aten.mul.Tensor(aten.repeat.default(x, [EXPERTS, 1]), by_expert)
    inner = aten.silu.default(aten.matmul.default(aten.reshape.default(routed, [EXPERTS, -1, WIDTH]), up))
    merged = aten.reshape.default(aten.matmul.default(inner, down), [-1, WIDTH])
    return aten.sum.dim_IntList(aten.reshape.default(merged, [EXPERTS, -1, WIDTH]), [0])


def test_fuses(golden: Golden) -> None:
    passes = separate_repeats, fuse_expert_linear, normalize_routing, simplify_layout
    made = PatternGraph(every_expert, router=(WIDTH, EXPERTS), up=(EXPERTS, WIDTH, 5), down=(EXPERTS, 5, WIDTH))
    golden("passes/fuse_expert_linear.txt", rewritten(made, *passes))


def _shared_experts(summed: Callable[[Any], Any]) -> PatternGraph:
    """Every token through every expert, and their sum in bf16."""

    def body(x: Any, up: Any) -> Any:
        by_expert = aten.expand.default(aten.unsqueeze.default(x, 0), [EXPERTS, -1, -1])
        return aten._to_copy.default(summed(aten.matmul.default(by_expert, up)), dtype=torch.bfloat16)

    return PatternGraph(body, torch.bfloat16, up=(EXPERTS, WIDTH, WIDTH))


def test_a_sum_in_fp32_rounds_once() -> None:
    def summed(product: Any) -> Any:
        return aten.sum.dim_IntList(aten._to_copy.default(product, dtype=torch.float32), [0])

    text = rewritten(_shared_experts(summed), fuse_expert_linear, tolerance=0.05)
    assert "llmc.sum_experts" in text and "aten._to_copy" not in text


def _widened(product: Any) -> Any:
    return aten.exp.default(aten.sum.dim_IntList(aten._to_copy.default(product, dtype=torch.float32), [0]))


def _in_fp32(product: Any) -> Any:
    return aten.sum.dim_IntList(product, [0], dtype=torch.float32)


@pytest.mark.parametrize("summed", [_widened, _in_fp32])
def test_a_sum_that_stays_in_fp32_is_left(summed: Callable[[Any], Any]) -> None:
    assert "llmc.sum_experts" not in rewritten(_shared_experts(summed), fuse_expert_linear, tolerance=0.05)


def test_products_of_activations_are_left() -> None:
    def body(x: Any) -> Any:
        parts = aten.transpose.int(aten.reshape.default(x, [-1, 2, WIDTH // 2]), 0, 1)
        product = aten.matmul.default(parts, aten.matmul.default(aten.transpose.int(parts, 1, 2), parts))
        return aten.reshape.default(aten.transpose.int(product, 0, 1), [-1, WIDTH])

    assert count(run_pipeline(PatternGraph(body).graph, (fuse_expert_linear,), BuildOptions()).records) == 0


def test_repeats_of_different_numbers_of_runs_are_left() -> None:
    def body(x: Any) -> Any:
        twice = aten.reshape.default(aten.transpose.int(aten.reshape.default(x, [-1, 2, WIDTH // 2]), 0, 1), [-1, 4])
        scaled = aten.exp.default(twice)
        halves = aten.reshape.default(aten.mul.Tensor(scaled, twice), [-1, WIDTH])
        return aten.mul.Tensor(x, halves)

    text = rewritten(PatternGraph(body), separate_repeats)
    assert "aten.exp(%transpose_int" in text


def test_sums_over_channels_are_left() -> None:
    def body(x: Any, up: Any, down: Any) -> Any:
        product = aten.matmul.default(
            aten.reshape.default(aten.repeat.default(x, [EXPERTS, 1]), [EXPERTS, -1, WIDTH]), up
        )
        return aten.matmul.default(aten.transpose.int(aten.sum.dim_IntList(product, [2]), 0, 1), down)

    made = PatternGraph(body, up=(EXPERTS, WIDTH, 5), down=(EXPERTS, WIDTH))
    text = rewritten(made, separate_repeats, fuse_expert_linear)
    assert "llmc.expert_linear" in text and "llmc.sum_experts" not in text


def test_vectors_have_no_runs() -> None:
    def body(x: Any, bias: Any) -> Any:
        return aten.add.Tensor(x, aten.reshape.default(aten.reshape.default(bias, [2, 4]), [WIDTH]))

    made = PatternGraph(body, bias=(WIDTH,))
    assert count(run_pipeline(made.graph, (separate_repeats,), BuildOptions()).records) == 0
