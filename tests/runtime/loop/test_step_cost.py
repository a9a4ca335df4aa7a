"""What a step of plain decodes costs the runtime, in calls: nothing of what speculation has, whatever it learns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from llmc.program import Limits
from llmc.runtime.loop.publish import publish
from llmc.runtime.loop.step import Ints
from llmc.runtime.sampling.sampler import Sampler
from tests.runtime.model_free import Checksums, Counted, Run


class Fives(Checksums):
    """Every token is a 5, at the cost of one call."""

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> list[Any]:
        return [5] * len(rows)


def called(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result, and the file of each Python function that was called for it, or "" for one of C."""
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            files.append(frame.f_code.co_filename if event == "call" else "")

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, files


def never(sources: Ints, destinations: Ints, group: int) -> None:
    raise AssertionError("nothing is to be moved")


def one_step(requests: int) -> dict[str, list[str]]:
    """The calls of the parts of a step in which so many requests decode and none begins a block."""
    run = Run(Limits(256, 64, 64, 64, 16), 400)
    for number in range(requests):
        run.add(Counted([1 + number, 2, 3, 4, 5], 40))
    for _ in range(4):
        run.step()
    calls: dict[str, list[str]] = {}
    plan, calls["schedule"] = called(run.scheduler.schedule)
    assert len(plan.decodes) == requests and not plan.chunks
    step, calls["fill"] = called(lambda: run.inputs.fill(plan))
    assert not step.tree_masks.any()
    results = Fives(np.zeros((requests, 1), np.float32))
    chosen, calls["publish"] = called(lambda: publish(plan, results, run.scheduler, never))
    _, calls["advance"] = called(lambda: run.inputs.advance(chosen))
    return calls


@pytest.mark.parametrize("part", ["schedule", "fill", "publish", "advance"])
def test_no_code_of_speculation_runs(part: str) -> None:
    for file in one_step(4)[part]:
        assert not any(name in file for name in ("speculation", "accepted_path", "judged_results")), file


def test_more_requests_cost_only_what_gives_them_their_tokens() -> None:
    few, many = one_step(4), one_step(60)
    for part in ("schedule", "fill", "advance"):
        assert len(many[part]) <= len(few[part])
    assert len(few["schedule"]) <= 30 and len(few["fill"]) <= 15 and len(few["advance"]) <= 5
    # `accept` of the test's own request, and what that calls, beside what there is for all of them.
    assert (len(many["publish"]) - len(few["publish"])) % 56 == 0
    assert len(few["publish"]) - 4 * (len(many["publish"]) - len(few["publish"])) // 56 <= 12
