"""How contestants are measured in turn."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.measure import Sample, alternate


def test_each_run_has_each_place_of_a_round() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = alternate({name: partial(run, name) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert samples["a"].seconds == (6.0, 8.0, 10.0)


def test_pairs_of_a_round_do_not_see_what_changes_between_rounds() -> None:
    slower, faster = Sample((1.1, 2.2, 5.0)), Sample((1.0, 2.0, 4.0))
    assert slower.paired_ratio(faster) == pytest.approx(1.1)
    assert slower.median / faster.median == pytest.approx(1.1)
    assert Sample((1.1, 9.0, 2.2)).paired_ratio(Sample((1.0, 2.0, 2.0))) == pytest.approx(1.1)
