"""The matcher: spelling, order, dims, casts, repeated wildcards, shared nodes and near-misses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from llmc.graph.refusal import Refusal, Refused
from llmc.graph.stage import Stage
from llmc.passes.match import Match, find_match
from llmc.passes.pattern import Weight, either
from llmc.passes.rewrite import Rewrite
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph, rewritten

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


def test_alternatives_inside_a_pattern() -> None:
    def pattern(x: Any, power: Any) -> Any:
        square = either(aten.pow.Tensor_Scalar(x, power), aten.mul.Tensor(x, x))
        return either(aten.neg.default(square), aten.exp.default(square))

    by_power = _match(lambda x: aten.neg.default(aten.pow.Tensor_Scalar(x, 2)), pattern)
    by_product = _match(lambda x: aten.exp.default(aten.mul.Tensor(x, x)), pattern)
    assert isinstance(by_power, Match) and by_power.bound["power"] == 2
    assert isinstance(by_product, Match) and "power" not in by_product.bound
    seen = _match(lambda x: aten.exp.default(aten.sin.default(x)), pattern)
    assert seen is None  # one op of two is no near-miss


def test_an_alternative_that_is_used_twice_is_the_same_one() -> None:
    def pattern(x: Any) -> Any:
        y = either(aten.neg.default(x), aten.abs.default(x))
        return aten.sub.Tensor(aten.exp.default(y), y)

    assert isinstance(_match(lambda x: aten.sub.Tensor(aten.exp.default(y := aten.abs.default(x)), y), pattern), Match)
    mixed = _match(lambda x: aten.sub.Tensor(aten.exp.default(aten.neg.default(x)), aten.abs.default(x)), pattern)
    assert isinstance(mixed, Refusal)


def test_wildcards_of_one_kind() -> None:
    def pattern(x: Any, weight: Weight, factor: float) -> Any:
        return aten.mul.Tensor(aten.add.Tensor(x, weight), factor)

    # In the order in which the operands stand, x would be the weight.
    match = _match(lambda x, a: aten.mul.Tensor(aten.add.Tensor(a, x), 0.5), pattern, a=(WIDTH,))
    assert isinstance(match, Match)
    assert {n: getattr(v, "name", v) for n, v in match.bound.items()} == {
        "weight": "a",
        "x": "embedding_default",
        "factor": 0.5,
    }
    seen = _match(lambda x, a: aten.mul.Tensor(aten.add.Tensor(x, a), a), pattern, a=(WIDTH,))
    assert isinstance(seen, Refusal)
    assert seen.reason == "argument 'other' of aten.mul.Tensor is a, expected a number"
    seen = _match(lambda x: aten.mul.Tensor(aten.add.Tensor(x, aten.neg.default(x)), 2.0), pattern)
    assert isinstance(seen, Refusal)
    assert seen.reason.endswith("expected a weight")


def test_a_refused_way_is_followed_by_the_next_one() -> None:
    def pattern(x: Any, y: Any) -> Any:
        return aten.add.Tensor(aten.neg.default(x), y)

    def precondition(match: Match) -> None:
        if match.bound["y"].target is not aten.abs.default:
            raise Refused("y is no abs", match.root)

    def body(x: Any) -> Any:
        return aten.add.Tensor(aten.neg.default(aten.exp.default(x)), aten.neg.default(aten.abs.default(x)))

    made = PatternGraph(body)
    (root,) = made.graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    seen = find_match((pattern,), root, made.graph, precondition)
    assert isinstance(seen, Refusal) and seen.reason == "y is no abs"
    swapped = find_match((lambda x, y: aten.add.Tensor(aten.neg.default(y), x),), root, made.graph)
    assert isinstance(swapped, Match)


def test_an_output_that_the_root_is_not_made_of_is_found_by_what_it_reads() -> None:
    def pattern(x: Any) -> Any:
        return aten.exp.default(x), aten.neg.default(x)

    made = PatternGraph(lambda x: aten.mul.Tensor(aten.neg.default(x), aten.exp.default(x)))
    (root,) = made.graph.graph.find_nodes(op="call_function", target=aten.exp.default)
    match = find_match((pattern,), root, made.graph)
    assert isinstance(match, Match)
    assert [n.name for n in match.outputs] == ["exp_default", "neg_default"]
    assert match.place.name == "neg_default"


def test_several_outputs_are_replaced_together() -> None:
    def pattern(x: Any) -> Any:
        total = aten.exp.default(x)
        return aten.sin.default(total), total

    def replacement(x: Any) -> Any:
        same = aten.exp.default(aten.mul.Tensor(x, 1.0))
        return aten.cos.default(aten.sub.Tensor(same, math.pi / 2)), same

    def body(x: Any) -> Any:
        total = aten.exp.default(x)
        return aten.mul.Tensor(aten.abs.default(total), aten.sin.default(total))

    both = Rewrite("both", (pattern,), replacement, stage=Stage.CAPTURED)
    text = rewritten(PatternGraph(body), both)
    assert text.count("aten.exp") == 1 and "aten.sin" not in text
