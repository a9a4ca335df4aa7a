"""The logits' product, and the contracts that canonicalization ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmc.errors import PassError
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.canonical.check_canonical import check_canonical
from llmc.passes.canonical.make_lm_head import make_lm_head
from llmc.passes.fusion.from_aten.fuse_linear import fuse_linear
from llmc.passes.runner import run_pipeline
from tests.graph_builder import GraphBuilder
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, refusals, rewritten

aten = torch.ops.aten
Golden = Callable[[str, str], None]


def _with_logits(body: Callable[..., Any]) -> PatternGraph:
    """A graph whose logits are what the body makes of x [T, WIDTH] and the table."""
    made = PatternGraph(lambda x: aten.mul.Tensor(x, 1.5))
    builder = GraphBuilder(dtype=torch.bfloat16)
    x = builder.embedded(WIDTH)
    made.graph, made.source = builder.finish_with(body(builder, x))
    made.graph.stage = Stage.CAPTURED
    return made


def test_logits_and_what_follows_them_are_computed_in_fp32(golden: Golden) -> None:
    def body(b: GraphBuilder, x: Any) -> Any:
        y = b.call(torch.ops.llmc.linear.default, x, b.embedding)
        y = b.call(aten._to_copy.default, y, dtype=torch.float32)
        y = b.call(aten.tanh.default, b.call(aten.div.Tensor, y, 30.0))
        return b.call(aten._to_copy.default, b.call(aten.mul.Tensor, y, 30.0), dtype=torch.bfloat16)

    golden("passes/make_lm_head.txt", rewritten(_with_logits(body), make_lm_head, tolerance=0.05))


def test_a_factor_for_each_token_goes_into_the_weight(golden: Golden) -> None:
    """Dory's head has a learned one, behind a cast."""

    def body(b: GraphBuilder, x: Any) -> Any:
        factor = b.weight("scale", b.vocab_size)
        y = b.call(torch.ops.llmc.linear.default, x, b.embedding)
        y = b.call(aten._to_copy.default, y, dtype=torch.float32)
        return b.call(aten.tanh.default, b.call(aten.mul.Tensor, y, factor))

    golden("passes/make_lm_head_factor.txt", rewritten(_with_logits(body), make_lm_head, tolerance=0.05))


def test_a_factor_behind_a_curve_stays_an_error() -> None:
    def body(b: GraphBuilder, x: Any) -> Any:
        factor = b.weight("scale", b.vocab_size)
        y = b.call(aten.tanh.default, b.call(torch.ops.llmc.linear.default, x, b.embedding))
        return b.call(aten.mul.Tensor, y, factor)

    with pytest.raises(PassError, match=r"the logits come from aten\.tanh"):
        run_pipeline(_with_logits(body).graph, (make_lm_head,), BuildOptions())


def test_a_factor_beside_a_computed_weight_stays_an_error() -> None:
    """It is no recipe into which the factor could go."""

    def body(b: GraphBuilder, x: Any) -> Any:
        factor = b.weight("scale", b.vocab_size)
        y = b.call(torch.ops.llmc.linear.default, x, b.call(aten.mul.Tensor, b.embedding, 2.0))
        return b.call(aten.mul.Tensor, y, factor)

    with pytest.raises(PassError, match=r"the logits come from aten\.mul"):
        run_pipeline(_with_logits(body).graph, (make_lm_head,), BuildOptions())


def test_logits_of_something_else_are_an_error() -> None:
    def body(b: GraphBuilder, x: Any) -> Any:
        y = b.call(torch.ops.llmc.linear.default, x, b.embedding)
        return b.call(aten.softmax.int, y, -1)

    with pytest.raises(PassError, match=r"the logits come from aten\.softmax\.int, expected a linear"):
        run_pipeline(_with_logits(body).graph, (make_lm_head,), BuildOptions())


@pytest.mark.parametrize(
    ("contract", "body", "problem"),
    [
        ("attention", lambda x: aten.softmax.int(x, -1), r"aten\.softmax\.int is not part of a form"),
        ("norm", lambda x: aten.layer_norm.default(x, [WIDTH]), r"aten\.layer_norm is not part"),
        ("linear", lambda x: aten.einsum.default("tc,tc->tc", [x, x]), r"aten\.einsum is not part"),
        ("embedding", lambda x: aten.gather.default(x, 1, aten.argmax.default(x, 1, True)), r"aten\.gather is not"),
        ("pointwise", lambda x: aten.erfinv.default(x), r"aten\.erfinv is not part"),
        (
            "layout",
            lambda x: aten.transpose.int(aten.exp.default(aten.transpose.int(x, 0, 1)), 0, 1),
            r"does not have all tokens as its first axis",
        ),
        (
            "layout",
            lambda x: aten.cat.default([aten.slice.Tensor(x, 0, 1, 99), aten.slice.Tensor(x, 0, 0, 1)], 0),
            r"does not have all tokens as its first axis",
        ),
        (
            "layout",
            lambda x: aten.add.Tensor(x, aten.sum.dim_IntList(x, [0], True)),
            r"float32\[1, 8\] does not have all tokens as its first axis",
        ),
    ],
)
def test_missed_contracts_name_the_op(contract: str, body: Callable[..., Any], problem: str) -> None:
    with pytest.raises(PassError, match=f"the contract '{contract}' is missed: .*{problem}"):
        run_pipeline(PatternGraph(body).graph, (check_canonical,), BuildOptions())


def test_a_fallback_is_offered_only_where_it_helps() -> None:
    for body, helps in ((aten.erfinv.default, False), (lambda x: aten.cumsum.default(x, 1), True)):
        with pytest.raises(PassError) as missed:
            run_pipeline(PatternGraph(body).graph, (check_canonical,), BuildOptions())
        assert ("allow_fallback=('pointwise',)" in str(missed.value.fix)) is helps


@pytest.mark.parametrize("axis", [0, -2])
def test_sums_along_the_tokens_are_refused_even_as_a_fallback(axis: int) -> None:
    """A step holds the tokens of many requests, which would be summed together."""
    made = PatternGraph(lambda x: aten.cumsum.default(x, axis))
    with pytest.raises(PassError, match=r"'layout' is missed: aten\.cumsum works across tokens"):
        run_pipeline(made.graph, (check_canonical,), BuildOptions(allow_fallback=("pointwise",)))


def _loose_angles(x: Any, positions: Any, inv_freq: Any) -> Any:
    return aten.mul.Tensor(x, torch.ops.llmc.rope_angles.default(positions, inv_freq, 1.0)[0])


def test_the_rope_contract_may_be_given_up() -> None:
    made = PatternGraph(_loose_angles, inv_freq=torch.ones(WIDTH))
    with pytest.raises(PassError, match=r"'rope' is missed: aten\.mul\.Tensor uses rotary angles by itself"):
        run_pipeline(made.graph, (check_canonical,), BuildOptions())
    result = run_pipeline(made.graph, (check_canonical,), BuildOptions(allow_fallback=("rope",)))
    assert result.graph.stage is Stage.CANONICAL


def test_a_missed_contract_lists_the_refusals() -> None:
    def body(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(x, aten.unsqueeze.default(aten.linear.default(x, weight), 1))

    made = PatternGraph(body, weight=(WIDTH,))
    assert refusals(made, fuse_linear)
    with pytest.raises(PassError, match=r"refused: the weight is \[8\], expected a matrix \(at linear_default\)"):
        run_pipeline(made.graph, (fuse_linear, check_canonical), BuildOptions())
