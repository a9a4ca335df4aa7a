"""Rewrites that are wrong in one place are disproved, with numbers that show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmc.debug.prove.verdict import Outcome, prove
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Match, Numerics, Rewrite, RewriteLog, either
from llmc.passes.example import Example
from llmc.passes.fusion.from_aten.fuse_rms_norm import fuse_rms_norm
from llmc.passes.fusion.from_aten.fuse_rope import fuse_rope
from llmc.passes.fusion.fuse_add_norm import fuse_add_norm
from llmc.passes.fusion.fuse_gated_linear import fuse_gated_linear
from llmc.passes.fusion.fuse_linear_residual import fuse_linear_residual

aten, ops = torch.ops.aten, torch.ops.llmc


def _another_epsilon(x: Any, weight: Any, eps: float) -> Any:
    return ops.rms_norm.default(x, weight, eps + 1e-6)


def _swapped_halves(x: Any, cos: Any, sin: Any, axis: int | None, flat: Any, last: Any, match: Match) -> Any:
    return fuse_rope.replacement(x, sin, cos, axis, flat, last, match)


def _other_way_round(x: Any, cos: Any, sin: Any, axis: int | None, flat: Any, last: Any, match: Match) -> Any:
    return fuse_rope.replacement(x, cos, aten.neg.default(sin), axis, flat, last, match)


def _ungated(x: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any, weight: Any, bias: Any, match: Match) -> Any:
    return fuse_gated_linear.replacement(x, gate, up, gate_bias, up_bias, weight, bias, "relu", match)


def _gate_after_up(
    x: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any, weight: Any, bias: Any, activation: str, match: Match
) -> Any:
    return fuse_gated_linear.replacement(x, up, gate, up_bias, gate_bias, weight, bias, activation, match)


def _first_of_two_outputs(x: Any, residual: Any, weight: Any, bias: Any, eps: Any, match: Match) -> Any:
    normed, _ = fuse_add_norm.replacement(x, residual, weight, bias, eps, match)
    return normed, x


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (fuse_rms_norm, _another_epsilon),
        (fuse_rope, _swapped_halves),
        (fuse_rope, _other_way_round),
        (fuse_gated_linear, _ungated),
        (fuse_gated_linear, _gate_after_up),
        (fuse_add_norm, _first_of_two_outputs),
    ],
)
def test_is_disproved(right: Rewrite, wrong: Any) -> None:
    verdict = prove(replace(right, replacement=wrong))
    assert verdict.outcome is Outcome.DISPROVED
    example = verdict.counterexample
    assert example is not None
    assert example.before != example.after
    assert len(example.inputs) <= 5


def test_a_scale_that_is_forgotten() -> None:
    def without_scale(x: Any, weight: Any, bias: Any, activation: Any, residual: Any) -> Any:
        return ops.fused_linear.default(x, weight, bias, residual, activation or "identity", 1.0)

    verdict = prove(replace(fuse_linear_residual, replacement=without_scale))
    assert verdict.outcome is Outcome.DISPROVED


def _halved_sigmoid(gate: Any, up: Any) -> Any:
    return aten.mul.Tensor(aten.mul.Tensor(aten.sigmoid.default(gate), 0.5), up)


def test_the_counterexample_is_three_numbers() -> None:
    def forgotten(gate: Any, up: Any) -> Any:
        return aten.mul.Tensor(aten.sigmoid.default(gate), up)

    verdict = prove(Rewrite("forgets_a_scale", (_halved_sigmoid,), forgotten))
    assert str(verdict) == "disproved: result[0, 0]: 0.25 becomes 0.5 at up[0, 0] = 1"


def test_another_shape_is_told() -> None:
    def summed(gate: Any, up: Any) -> Any:
        return aten.sum.dim_IntList(aten.mul.Tensor(gate, up), [0])

    verdict = prove(Rewrite("sums", (_halved_sigmoid,), summed))
    assert str(verdict) == "disproved: the replacement of float32[2, 4] is float32[4]"


def test_one_wrong_form_is_enough() -> None:
    def either_sign(x: Any) -> Any:
        return either(aten.mul.Tensor(x, x), aten.mul.Tensor(x, aten.neg.default(x)))

    verdict = prove(Rewrite("squares", (either_sign,), lambda x: aten.pow.Tensor_Scalar(x, 2)))
    assert verdict.outcome is Outcome.DISPROVED and verdict.forms == 2


def test_what_sympy_cannot_decide_is_compared() -> None:
    def tenth(x: Any) -> Any:
        return aten.mul.Tensor(aten.exp.default(x), 0.3333333333333)

    verdict = prove(Rewrite("thirds", (tenth,), lambda x: aten.div.Tensor(aten.exp.default(x), 3.0)))
    assert str(verdict) == "compared: 18 of 18 elements at random points"


def test_what_is_not_looked_at_says_why() -> None:
    lossy = Rewrite("rounds", (lambda x: aten.exp.default(x),), lambda x: x, numerics=Numerics.LOSSY)
    assert str(prove(lossy)) == "skipped: lossy: it changes numbers on purpose"

    def unknown(x: Any) -> Any:
        return aten.neg.default(aten.cumsum.default(x, 0))

    verdict = prove(Rewrite("sums_along", (unknown,), lambda x: aten.cumsum.default(aten.neg.default(x), 0)))
    assert verdict.outcome is Outcome.SKIPPED
    assert "aten.cumsum.default has no meaning over symbols" in str(verdict.reason)


def _subtract(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        log.step(f"subtract in {node.name}", node)
        node.target = aten.sub.Tensor


def test_a_loop_is_run_on_its_examples() -> None:
    def summed(x: Any, y: Any) -> Any:
        return aten.add.Tensor(x, y)

    def multiplied(x: Any, y: Any) -> Any:
        return aten.mul.Tensor(x, y)

    shapes = {"x": ("T", 2), "y": (2,)}
    wrong = GraphPass("subtracts", _subtract, examples=(Example(summed, shapes),))
    assert str(prove(wrong)) == "disproved: result[0, 0]: 1 becomes -1 at y[0] = 1"
    idle = GraphPass("subtracts", _subtract, examples=(Example(multiplied, shapes),))
    assert str(prove(idle)) == "skipped: it rewrites nothing in its example multiplied"


def test_each_of_several_results_is_compared() -> None:
    def both(x: Any, y: Any) -> tuple[Any, Any]:
        return aten.add.Tensor(x, y), aten.mul.Tensor(x, y)

    wrong = GraphPass("subtracts", _subtract, examples=(Example(both, {"x": ("T", 2), "y": (2,)}),))
    assert str(prove(wrong)) == "disproved: result 0[0, 0]: 1 becomes -1 at y[0] = 1"


def test_a_loop_without_an_example_says_why() -> None:
    def along(x: Any) -> Any:
        return aten.cumsum.default(x, 0)

    unknown = GraphPass("subtracts", _subtract, examples=(Example(along, {"x": (2, 3)}),))
    assert str(prove(unknown)) == "skipped: along: aten.cumsum.default has no meaning over symbols"
    assert "without examples" in str(prove(GraphPass("subtracts", _subtract)))
    assert str(prove(GraphPass("subtracts", _subtract, unproved="it may not"))) == "skipped: it may not"


def test_a_loop_is_run_with_the_options_of_its_example() -> None:
    def if_asked(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        if options.tensor_parallel_size == 2:
            _subtract(graph, options, log)

    def summed(x: Any) -> Any:
        return aten.add.Tensor(x, x)

    example = Example(summed, {"x": (2,)}, options=BuildOptions(tensor_parallel_size=2))
    assert prove(GraphPass("subtracts", if_asked, examples=(example,))).outcome is Outcome.DISPROVED
