"""A profile as a trace in Chrome's format, which Perfetto opens."""

from collections.abc import Sequence
from typing import Any

from llmc.program import Launch
from llmc.report.profile import Profile

_THREAD = 1


def chrome_trace(profile: Profile, launches: Sequence[Launch]) -> dict[str, Any]:
    """A process a step, each with one thread, times in microseconds.

    Processes and threads count from 1: Perfetto takes 0 for the idle process of an operating system.
    A launch starts where it did in the median step and takes its median time, but ends before the next one starts, to
    the nanosecond: Perfetto draws what overlaps as nested.
    """
    events: list[dict[str, Any]] = []
    for number, step in enumerate(profile.steps, 1):
        events.append({"ph": "M", "pid": number, "tid": _THREAD, "name": "process_name", "args": {"name": step.name}})
        events.append({"ph": "M", "pid": number, "tid": _THREAD, "name": "thread_name", "args": {"name": "launches"}})
        starts = [_nanoseconds(launch.start) for launch in step.launches]
        for timing, start, end in zip(step.launches, starts, [*starts[1:], None], strict=True):
            origin, duration = launches[timing.launch].origin, _nanoseconds(timing.seconds)
            events.append(
                {
                    "ph": "X",
                    "pid": number,
                    "tid": _THREAD,
                    "name": timing.kernel,
                    "cat": "launch",
                    "ts": start / 1e3,
                    "dur": (duration if end is None else max(0, min(duration, end - start))) / 1e3,
                    "args": {
                        "launch": timing.launch,
                        "median µs": timing.seconds * 1e6,
                        "predicted µs": timing.predicted * 1e6,
                        "nodes": ", ".join(origin.nodes),
                        "rewrite": origin.rewrite,
                        "source": origin.source,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
