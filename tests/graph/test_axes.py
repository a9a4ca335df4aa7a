"""One notation of axes: what an op's record and what a table of kernels says in it."""

from __future__ import annotations

import pytest

from llmc.graph.axes import Axis, axis_rule, fits, ranks_of, tensor_axes


def test_a_record_says_which_axes_belong_together() -> None:
    rule = axis_rule("q[t g*h d!] w[e:o i] x[* c~] -> [* g*h d!]")
    assert rule.arguments["q"] == (Axis("d", whole=True), Axis("g", inner=("h",)), Axis("t"))
    assert rule.arguments["w"] == (Axis("i"), Axis("o", repeats=True))
    assert rule.arguments["x"] == (Axis("c", squares=True),)
    assert axis_rule("x[g*s*i] -> [g*s*i]").result[0].levels == ("g", "s", "i")
    assert rule.leading == ("x",) and rule.is_summed("i") and not rule.is_summed("d")


def test_a_kernel_says_what_it_calls_sizes() -> None:
    axes = tensor_axes("x[tokens | groups? channels*] order[channels] ids[rows |] cos[_ | half]")
    assert list(axes) == ["x", "order", "ids", "cos"]
    rows, groups, channels = axes["x"]
    assert (rows.letter, rows.rows) == ("tokens", True)
    assert (groups.letter, groups.optional, groups.rows) == ("groups", True, False)
    assert (channels.letter, channels.rest, channels.inner) == ("channels", True, ())
    assert axes["ids"] == (Axis("rows", rows=True),) and axes["order"] == (Axis("channels"),)


@pytest.mark.parametrize(
    ("text", "ranks", "more"),
    [
        ("x[tokens | groups? channels]", (2, 3), False),
        ("x[tokens | channels*]", (2,), True),
        ("x[channels]", (1,), False),
    ],
)
def test_how_many_axes_fit(text: str, ranks: tuple[int, ...], more: bool) -> None:
    (axes,) = tensor_axes(text).values()
    assert ranks_of(axes) == ranks
    assert all(fits(rank, axes) for rank in ranks) and not fits(ranks[0] - 1, axes)
    assert fits(ranks[-1] + 1, axes) is more
