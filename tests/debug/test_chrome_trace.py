"""Traces keep to what Perfetto's importer needs of Chrome's trace event format, and hold every launch.

The format: "Trace Event Format", Google 2016. Perfetto drops or misplaces events that break these rules.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from llmc.engine_format import read_engine
from tests.cli.command import llmc

WORKLOAD = ("--prefill", "32", "--batch", "3", "--context", "20", "--repeats", "3", "--threads", "1")


@pytest.fixture(scope="module")
def trace(draft_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `llmc profile --trace` writes it, read as strictly as JSON is defined."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    outcome = llmc("profile", draft_engine, *WORKLOAD, "--trace", path)
    assert outcome.code == 0, outcome.err
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    return content


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["args"], dict)
        # 0 is the idle process, which Perfetto does not show.
        assert all(isinstance(event[name], int) and event[name] > 0 for name in ("pid", "tid"))
    for event in events(trace, "X"):
        assert isinstance(event["cat"], str)
        for name in ("ts", "dur"):
            assert isinstance(event[name], int | float) and isfinite(event[name]) and event[name] >= 0


def test_processes_and_threads_have_names(trace: dict[str, Any]) -> None:
    names = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events(trace, "M")}
    assert len(names) == len(events(trace, "M"))
    for pid, tid in {(event["pid"], event["tid"]) for event in events(trace, "X")}:
        assert isinstance(names["process_name", pid, tid]["name"], str)
        assert isinstance(names["thread_name", pid, tid]["name"], str)
    steps = [args["name"] for (name, _, _), args in names.items() if name == "process_name"]
    assert steps == ["prefill of 32 tokens", "decode, 3 requests at context 20"]


def test_every_launch_is_there_and_none_overlaps(trace: dict[str, Any], draft_engine: Path) -> None:
    launches = read_engine(draft_engine).program.launches
    launched = events(trace, "X")
    assert len(launched) == 2 * len(launches)
    for number in (1, 2):
        mine = [event for event in launched if event["pid"] == number]
        assert [event["name"] for event in mine] == [launch.kernel for launch in launches]
        spans = [(round(event["ts"] * 1e3), round(event["dur"] * 1e3)) for event in mine]  # as Perfetto rounds them
        assert all(start + duration <= after for (start, duration), (after, _) in pairwise(spans)), "would be nested"
        assert "modeling_llama.py" in mine[-1]["args"]["source"]
