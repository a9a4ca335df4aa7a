"""Each number among the sampling parameters stands in the table, which says what it may be."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from llmc.errors import RequestError
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.sampling_table import SAMPLING_NUMBERS, SamplingNumber


def test_every_number_stands_in_the_table() -> None:
    numbers = {name: hint for name, hint in get_type_hints(SamplingParams).items() if hint in (int, float, int | None)}
    assert set(numbers) == set(SAMPLING_NUMBERS)
    for name, hint in numbers.items():
        assert SAMPLING_NUMBERS[name].is_whole == (hint is not float)
        assert (SAMPLING_NUMBERS[name].default is None) == (hint == int | None)


@pytest.mark.parametrize("name", SAMPLING_NUMBERS)
def test_bounds_may_be_reached_and_not_passed(name: str) -> None:
    number = SAMPLING_NUMBERS[name]
    step = 1 if number.is_whole else 0.001
    refused: list[Any] = [number.low if number.above else number.low - step, True, "1", float("nan")]
    refused += [] if number.high is None else [number.high + step]
    for value in refused:
        with pytest.raises(RequestError, match=f"sampling parameter {name} cannot be") as caught:
            SamplingParams(**{name: value})
        assert caught.value.fix == f"give {number.refusal(value)}"
    assert number.refusal(number.low + step if number.above else number.low) is None
    assert number.high is None or number.refusal(number.high) is None


def test_what_is_allowed_is_said() -> None:
    assert SamplingNumber(0, 0, None).refusal(1.0) == "a whole number from 0 up"
    assert SamplingNumber(1.0, 0.0, 1.0, above=True).refusal(0) == "a number above 0 to 1"
    assert SamplingNumber(1, 1, 1000).refusal(None) == "a whole number from 1 to 1000"
    assert SamplingNumber(None, 1, None).refusal(None) is None
