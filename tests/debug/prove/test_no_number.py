"""Where an expression is no real number: a difference if the other one is one there, else nothing that was seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.debug.prove.verdict import prove
from llmc.passes import Rewrite
from tests.cli.command import llmc

aten = torch.ops.aten


def _negative(x: Any) -> Any:
    return aten.neg.default(x)


def _over_nothing(x: Any) -> Any:
    return aten.div.Tensor(aten.neg.default(x), aten.sub.Tensor(x, x))


def _over_no_power(x: Any) -> Any:
    return aten.div.Tensor(aten.neg.default(x), aten.sub.Tensor(aten.exp.default(x), aten.exp.default(x)))


def _over_what_cancels(x: Any) -> Any:
    squares = [aten.mul.Tensor(value, value) for value in (aten.sin.default(x), aten.cos.default(x))]
    return aten.div.Tensor(x, aten.sub.Tensor(aten.add.Tensor(*squares), 1.0))


def _log_of_square(x: Any) -> Any:
    return aten.log.default(aten.mul.Tensor(x, x))


def _twice_log(x: Any) -> Any:
    return aten.mul.Tensor(aten.log.default(x), 2.0)


def _log_of_negative(x: Any) -> Any:
    return aten.log.default(aten.neg.default(aten.exp.default(x)))


def _less(x: Any, y: Any) -> Any:
    return aten.lt.Tensor(x, y)


twice_log = Rewrite("twice_log", (_log_of_square,), _twice_log)


@pytest.mark.parametrize(
    ("pattern", "replacement", "shown"),
    [
        (_negative, _over_nothing, "disproved: result[0, 0]: 0 becomes nan at all 0"),
        (_negative, _over_no_power, "disproved: result[0, 0]: 0 becomes nan at all 0"),
        (_negative, _over_what_cancels, "disproved: result[0, 0]: 0 becomes nan at all 0"),
        (_over_nothing, _negative, "disproved: result[0, 0]: nan becomes 0 at all 0"),
        (_log_of_square, _twice_log, "disproved: result[0, 0]: 0.446287 becomes 0.446287+6.28319j at x[0, 0] = -1.25"),
        (
            _log_of_negative,
            lambda x: aten.mul.Tensor(_log_of_negative(x), 2.0),
            "skipped: result[0, 0] is a real number at none of 10 points",
        ),
        (_over_what_cancels, _over_nothing, "skipped: result[0, 0] is a real number at none of 10 points"),
        (_less, lambda x, y: aten.gt.Tensor(y, x), "proved: 1 form, 7 cases"),
        (_less, lambda x, y: aten.le.Tensor(x, y), "disproved: result[0, 0]: 0 becomes 1 at x[0, 0] = 1, y[0, 0] = 1"),
    ],
)
def test_what_is_no_number(pattern: Callable[..., Any], replacement: Callable[..., Any], shown: str) -> None:
    assert str(prove(Rewrite("divides", (pattern,), replacement))) == shown


def test_logarithms_are_compared_where_they_are_real() -> None:
    def thirds(x: Any) -> Any:
        return aten.mul.Tensor(aten.log.default(x), 0.3333333333333)

    verdict = prove(Rewrite("thirds", (thirds,), lambda x: aten.div.Tensor(aten.log.default(x), 3.0)))
    assert str(verdict).endswith("elements at random points")


def test_json_has_them_as_text() -> None:
    outcome = llmc("prove", "--passes-from", f"{Path(__file__)}:twice_log", "--json")
    assert outcome.code == 1, outcome.err
    (verdict,) = json.loads(outcome.out)
    counterexample = verdict["counterexample"]
    assert isinstance(counterexample["before"], float)
    assert counterexample["after"].endswith("j)")


def test_a_replacement_that_cannot_be_evaluated_or_fails_says_so() -> None:
    verdict = prove(Rewrite("sums", (_negative,), lambda x: aten.cumsum.default(x, 0)))
    assert str(verdict).startswith("skipped: after it: NotOverSymbols: aten.cumsum.default has no meaning")

    def fails(x: Any) -> Any:
        raise ValueError("not today")

    assert (
        str(prove(Rewrite("fails", (_negative,), fails))) == "disproved: the replacement fails: ValueError: not today"
    )
