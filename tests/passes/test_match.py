"""The matcher: spelling, order, dims, casts, repeated wildcards, shared nodes and near-misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from llmc.graph.refusal import Refusal
from llmc.passes.match import Match, find_match
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph

aten = torch.ops.aten


def _match(body: Callable[..., Any], *patterns: Callable[..., Any], **weights: Any) -> Match | Refusal | None:
    """Match the patterns at what the body returns."""
    made = PatternGraph(body, weights.pop("dtype", torch.float32), **weights)
    logits = made.graph.graph.output_node().args[0]
    assert isinstance(logits, fx.Node)
    root = logits.args[0]
    assert isinstance(root, fx.Node)
    return find_match(patterns, root, made.graph)


def test_arguments_match_however_they_are_spelled() -> None:
    def body(x: Any) -> Any:
        return aten.add.Tensor(x, aten.gelu.default(aten.sum.dim_IntList(x, dim=[1], keepdim=True), approximate="none"))

    match = _match(body, lambda x, y: aten.add.Tensor(y, aten.gelu.default(aten.sum.dim_IntList(x, [-1], True))))
    assert isinstance(match, Match)
    assert match.bound["x"] is match.bound["y"]
    assert [n.name for n in match.nodes] == ["add_tensor", "gelu_default", "sum_dim_int_list"]


def test_commutative_ops_match_in_both_orders_with_backtracking() -> None:
    def pattern(x: Any, a: Any, b: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(x, a), aten.mul.Tensor(aten.neg.default(x), b))

    def body(x: Any, a: Any, b: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(b, aten.neg.default(x)), aten.mul.Tensor(a, x))

    match = _match(body, pattern, a=(WIDTH,), b=(WIDTH,))
    assert isinstance(match, Match)
    assert {n: v.name for n, v in match.bound.items()} == {"x": "embedding_default", "a": "a", "b": "b"}


def test_a_wildcard_means_the_same_each_time() -> None:
    def pattern(x: Any) -> Any:
        return aten.mul.Tensor(aten.exp.default(x), aten.neg.default(x))

    def body(x: Any) -> Any:
        return aten.mul.Tensor(aten.exp.default(x), aten.neg.default(aten.exp.default(x)))

    seen = _match(body, pattern)
    assert isinstance(seen, Refusal)
    assert "expected embedding_default, the same 'x' as before" in seen.reason


@pytest.mark.parametrize(("dtype", "casts"), [(torch.float32, 0), (torch.bfloat16, 2)])
def test_a_cast_may_be_absent_where_the_dtype_is_right_already(dtype: torch.dtype, casts: int) -> None:
    def pattern(x: Any, out: Any) -> Any:
        wide = aten._to_copy.default(x, dtype=torch.float32)
        return aten.neg.default(aten._to_copy.default(aten.exp.default(wide), dtype=out))

    def body(x: Any) -> Any:
        return aten.neg.default(aten.exp.default(x))

    def cast_body(x: Any) -> Any:
        wide = aten._to_copy.default(x, dtype=torch.float32)
        return aten.neg.default(aten._to_copy.default(aten.exp.default(wide), dtype=torch.bfloat16))

    match = _match(body if casts == 0 else cast_body, pattern, dtype=dtype)
    assert isinstance(match, Match)
    assert match.bound["out"] is dtype
    assert match.tensor("x").dtype is dtype


def test_a_missing_cast_of_another_dtype_is_a_near_miss() -> None:
    def pattern(x: Any) -> Any:
        return aten.neg.default(aten.exp.default(aten._to_copy.default(x, dtype=torch.float32)))

    seen = _match(lambda x: aten.neg.default(aten.exp.default(x)), pattern, dtype=torch.bfloat16)
    assert isinstance(seen, Refusal)
    assert seen.reason == "argument 'self' of aten.exp.default has dtype torch.bfloat16, expected torch.float32"


def test_an_extra_user_is_named_unless_it_only_costs_a_view() -> None:
    def pattern(x: Any) -> Any:
        return aten.exp.default(aten.neg.default(aten.slice.Tensor(x, 1, 0, 4)))

    def shared_view(x: Any) -> Any:
        part = aten.slice.Tensor(x, 1, 0, 4)
        return aten.cat.default([aten.abs.default(part), aten.exp.default(aten.neg.default(part))], 1)

    made = PatternGraph(shared_view)
    (exp,) = made.graph.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert isinstance(find_match((pattern,), exp, made.graph), Match)

    def shared_arithmetic(x: Any) -> Any:
        negative = aten.neg.default(aten.slice.Tensor(x, 1, 0, 4))
        return aten.cat.default([aten.abs.default(negative), aten.exp.default(negative)], 1)

    made = PatternGraph(shared_arithmetic)
    (exp,) = made.graph.graph.find_nodes(op="call_function", target=aten.exp.default)
    seen = find_match((pattern,), exp, made.graph)
    assert isinstance(seen, Refusal)
    assert seen.reason == "neg_default is also used by abs_default (aten.abs.default)"
    assert isinstance(find_match((pattern,), exp, made.graph, shares_interior=True), Match)


def test_less_than_half_of_a_pattern_is_no_near_miss() -> None:
    def pattern(x: Any) -> Any:
        return aten.exp.default(aten.neg.default(aten.sin.default(aten.cos.default(x))))

    assert _match(lambda x: aten.exp.default(aten.neg.default(x)), pattern) is None
    seen = _match(lambda x: aten.exp.default(aten.neg.default(aten.sin.default(x))), pattern)
    assert isinstance(seen, Refusal)
    assert seen.reason.endswith("aten.sin.default is llmc.embedding.default, expected a call of aten.cos.default")


def test_the_first_pattern_that_holds_wins() -> None:
    def other(x: Any) -> Any:
        return aten.exp.default(aten.cos.default(x))

    def any_exp(x: Any) -> Any:
        return aten.exp.default(x)

    match = _match(lambda x: aten.exp.default(aten.neg.default(x)), other, any_exp)
    assert isinstance(match, Match)
    assert match.bound["x"].name == "neg_default"
