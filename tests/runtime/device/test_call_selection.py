"""Calls found in arrays are those that calls_of_step finds one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import EngineFormatError
from llmc.program import RowCount, RowRange, StepOutput
from llmc.runtime.device.call_selection import CallSelection
from llmc.runtime.device.program import PlannedCall, calls_of_step, plan_calls
from tests.runtime.device.device_program import program

(CALL,) = plan_calls(program("sm_90"))
ranges = st.builds(
    RowRange, st.sampled_from(RowCount), st.integers(0, 20), st.none() | st.integers(0, 40)
)  # The last one never holds.
names = st.lists(st.sampled_from(["hidden", "other"]), max_size=2).map(tuple)
calls = st.builds(
    lambda only, wanted, sides, unless, grid: replace(
        CALL, only=only, wanted=wanted, sides=sides, unless=unless, grid=grid
    ),
    st.none() | ranges,
    st.lists(st.sampled_from(StepOutput), max_size=2).map(tuple),
    names,
    names,
    st.sampled_from([("T", "2"), ("cdiv(T, 8)", "R"), ("T - 5", "L", "3"), ("(T - R) * 4",), ("max_blocks",)]),
)


@given(st.lists(calls, max_size=8), st.tuples(*[st.integers(1, 40)] * 4), st.sampled_from(StepOutput), names)
def test_found_in_arrays_or_one_by_one(
    planned: list[PlannedCall], numbers: tuple[int, ...], wanted: StepOutput, sides: tuple[str, ...]
) -> None:
    counts = dict(zip(("T", "L", "R", "max_blocks"), numbers, strict=True))
    selection = CallSelection(planned)
    for _ in range(2):
        found = [(planned[index], grid) for index, grid in selection.of_step(counts, wanted, sides)]
        assert found == calls_of_step(planned, counts, wanted, sides)


def test_a_grid_that_cannot_be_is_an_error_only_in_steps_that_have_it() -> None:
    selection = CallSelection([replace(CALL, grid=("cdiv(T, L - 1)",), only=RowRange(RowCount.TOKENS, 2, None))])
    counts = {"T": 1, "L": 1, "R": 1, "max_blocks": 1}
    assert selection.of_step(counts, StepOutput.LOGITS) == []
    with pytest.raises(EngineFormatError, match="cdiv by 0"):
        selection.of_step(counts | {"T": 2}, StepOutput.LOGITS)
