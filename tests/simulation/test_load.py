"""Loads from files and from seeds; what cannot be read is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.bench.prompts import PromptShape
from llmc.errors import OptionError
from llmc.simulation.load import Arrival, drawn_load, longest, read_trace


def line(**values: object) -> str:
    return json.dumps({"arrival": 0.5, "prompt_tokens": 8, "output_tokens": 4} | values)


def test_lines_come_in_order_of_arrival(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{line(arrival=2)}\n\n{line(arrival=1, prompt_tokens=3)}\n")
    assert read_trace(trace) == (Arrival(1.0, 3, 4), Arrival(2.0, 8, 4))
    assert longest(read_trace(trace)) == 12


def test_what_a_benchmark_wrote_is_a_trace(tmp_path: Path) -> None:
    record = tmp_path / "bench.json"
    request = {"arrival": 0.25, "ttft": 0.1, "prompt_tokens": 8, "output_tokens": 4, "error": None}
    record.write_text(json.dumps({"completed": 1, "requests": [request]}, indent=1))
    assert read_trace(record) == (Arrival(0.25, 8, 4),)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "no object"),
        (line(arrival=None), "arrival is None"),
        (line(arrival=-1), "arrival is -1"),
        (line(arrival=float("inf")), "arrival is inf"),
        (line(arrival=True), "arrival is True"),
        (line(prompt_tokens=0), "prompt_tokens is 0"),
        (line(output_tokens=1.5), "output_tokens is 1.5"),
        ('{"arrival": 1}', "prompt_tokens is None"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, problem: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{line()}\n{line()}\n{bad}\n")
    with pytest.raises(OptionError, match=problem) as caught:
        read_trace(trace)
    assert str(caught.value.at).endswith("trace.jsonl:3")


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(OptionError, match="no requests"):
        read_trace(tmp_path / "empty")


def test_a_seed_gives_the_same_load_and_another_another() -> None:
    shape = PromptShape(input_len=100, output_len=20, range_ratio=0.5)
    first, same, other = (drawn_load(shape, 500, 4.0, seed) for seed in (1, 1, 2))
    assert first == same != other
    assert all(50 <= arrival.prompt_tokens <= 150 and 10 <= arrival.output_tokens <= 30 for arrival in first)
    assert first[-1].arrival == pytest.approx(500 / 4, rel=0.2)
    assert {arrival.arrival for arrival in drawn_load(shape, 5, None, 1)} == {0.0}
    with pytest.raises(OptionError, match="the rate cannot be 0"):
        drawn_load(shape, 5, 0.0, 1)
