"""A profile as a trace in Chrome's format, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.debug.profile import Profile
from llmc.program import Launch


def chrome_trace(profile: Profile, launches: Sequence[Launch]) -> dict[str, Any]:
    """A process a step, times in microseconds.

    A launch starts where it did in the median step and takes its median time, but ends before the next one starts:
    Perfetto draws what overlaps as nested.
    """
    events: list[dict[str, Any]] = []
    for number, step in enumerate(profile.steps):
        events.append({"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": step.name}})
        events.append({"ph": "M", "pid": number, "tid": 0, "name": "thread_name", "args": {"name": "launches"}})
        ends = [*(each.start for each in step.launches[1:]), float("inf")]
        for each, end in zip(step.launches, ends, strict=True):
            origin = launches[each.launch].origin
            events.append(
                {
                    "ph": "X",
                    "pid": number,
                    "tid": 0,
                    "name": each.kernel,
                    "cat": "launch",
                    "ts": each.start * 1e6,
                    "dur": max(0.0, min(each.seconds, end - each.start)) * 1e6,
                    "args": {
                        "launch": each.launch,
                        "median µs": each.seconds * 1e6,
                        "predicted µs": each.predicted * 1e6,
                        "nodes": ", ".join(origin.nodes),
                        "rewrite": origin.rewrite,
                        "source": origin.source,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
