"""The arena: nothing alive overlaps, everything is aligned, and memory is shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.codegen.memory_plan import ALIGNMENT, Lifetime, plan_memory
from llmc.program import Affine, RowCount


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    first = draw(st.integers(0, 30))
    return Lifetime(
        draw(st.sampled_from(RowCount)), draw(st.integers(1, 5000)), first, first + draw(st.integers(0, 12))
    )


@given(st.lists(lifetimes(), max_size=30), st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=3))
def test_nothing_alive_overlaps(lives: list[Lifetime], sizes: list[tuple[int, int]]) -> None:
    plan = plan_memory(lives)
    for tokens, logit_rows in [(1, 1), *sizes]:
        spans = []
        for life, offset in zip(lives, plan.offsets, strict=True):
            start = offset.at(tokens=tokens, logit_rows=logit_rows)
            rows = {RowCount.TOKENS: tokens, RowCount.LOGIT_ROWS: logit_rows, RowCount.ONE: 1}[life.rows]
            spans.append((start, start + rows * life.row_bytes))
            assert start % ALIGNMENT == 0
            assert spans[-1][1] <= plan.arena.at(tokens=tokens, logit_rows=logit_rows)
        for i, a in enumerate(lives):
            for j, b in enumerate(lives[:i]):
                if a.first <= b.last and b.first <= a.last:
                    assert spans[i][1] <= spans[j][0] or spans[j][1] <= spans[i][0]


@given(st.lists(lifetimes(), max_size=30))
def test_the_arena_is_between_the_largest_moment_and_the_sum(lives: list[Lifetime]) -> None:
    plan = plan_memory(lives)
    for rows, planned, total in (
        (RowCount.TOKENS, plan.arena.tokens, plan.unplanned.tokens),
        (RowCount.LOGIT_ROWS, plan.arena.logit_rows, plan.unplanned.logit_rows),
        (RowCount.ONE, plan.arena.constant, plan.unplanned.constant),
    ):
        mine = [x for x in lives if x.rows is rows]
        padded = [-(-x.row_bytes // ALIGNMENT) * ALIGNMENT for x in mine]
        busiest = max(
            (sum(p for p, x in zip(padded, mine, strict=True) if x.first <= t <= x.last) for t in range(50)), default=0
        )
        assert busiest <= planned <= total == sum(padded)


def test_a_chain_needs_two_buffers() -> None:
    chain = [Lifetime(RowCount.TOKENS, 256, i, i + 1) for i in range(10)]
    plan = plan_memory(chain)
    assert plan.arena == Affine(tokens=512)
    assert plan.unplanned == Affine(tokens=2560)


def test_regions_follow_each_other() -> None:
    plan = plan_memory([Lifetime(rows, 100, 0, 0) for rows in (RowCount.LOGIT_ROWS, RowCount.TOKENS, RowCount.ONE)])
    assert plan.offsets == (Affine(128, 128, 0), Affine(128, 0, 0), Affine())
    assert plan.arena == Affine(128, 128, 128)
