"""Run a step and give each request what it asked for: logits, or a token that was chosen where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.errors import RequestError
from llmc.runtime.executors.executor import ChoosingExecutor, Chosen, Executor, Logits
from llmc.runtime.request import LogitRows, Request
from llmc.runtime.row_choice import BEST, RowChoice, RowChoices, least_wanted
from llmc.runtime.sampler import Sampler, choose
from llmc.runtime.scheduler import Scheduler, StepPlan
from llmc.runtime.step import Step


class StepResults(LogitRows, Protocol):
    """A step's logits, and the tokens chosen from them."""

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Each sampler's token for its row, or why there is none. `rows` ascend."""
        ...


def compute(executor: Executor, step: Step) -> StepResults:
    """Run a step whose tokens are chosen here."""
    return _HostResults(executor.step(step))


def compute_choosing(executor: ChoosingExecutor, step: Step, plan: StepPlan) -> StepResults:
    """Run the step of a plan. The logits stay on the device, which chooses tokens, where nobody needs them."""
    choices = [request.choice for request in plan.decodes]
    choices += [chunk.request.choice for chunk in plan.chunks for _ in range(chunk.logit_rows)]
    if not any(choices):
        return compute(executor, step)
    given = RowChoices.of([choice or BEST for choice in choices])
    return _DeviceResults(executor, executor.choose(step, least_wanted(choices), given), choices)


def publish(plan: StepPlan, results: StepResults, scheduler: Scheduler) -> None:
    """Advance every request and give it its logits, or the token that was chosen from them for it."""
    batch: list[Request] = []
    samplers: list[Sampler] = []
    rows: list[int] = []
    scorers: list[tuple[Request, int, int]] = []
    for row, request in enumerate(plan.decodes):
        request.computed += 1
        if request.sampler is None:
            scorers.append((request, row, 1))
        else:
            batch.append(request)
            samplers.append(request.sampler)
            rows.append(row)
    row = decodes = len(plan.decodes)
    for chunk in plan.chunks:
        request = chunk.request
        request.computed += chunk.count
        if not chunk.logit_rows:
            scheduler.settle(request)
        elif request.sampler is None:
            scorers.append((request, row, chunk.logit_rows))
        else:
            batch.append(request)
            samplers.append(request.sampler)
            rows.append(row)
        row += chunk.logit_rows
    for request, row, token in zip(batch, rows, results.tokens(samplers, rows), strict=True):
        if isinstance(token, int):
            request.accept(token, results, row)
        else:
            request.fail(token)
        if request.finished or row >= decodes:
            scheduler.settle(request)
    for request, row, count in scorers:
        request.receive(request.computed - count, results.logits(row, count))
        request.scored = max(request.scored, request.computed)
        request.follow(scheduler)
        scheduler.settle(request)


@dataclass(frozen=True)
class _HostResults:
    all_logits: Logits

    def logits(self, first: int, count: int) -> Logits:
        """A view."""
        return self.all_logits[first : first + count]

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Chosen here."""
        return choose(samplers, self.all_logits, rows)


@dataclass(frozen=True)
class _DeviceResults:
    """chosen: for the rows with a choice; the others' logits are fetched."""

    executor: ChoosingExecutor
    chosen: Chosen
    choices: Sequence[RowChoice | None]

    def logits(self, first: int, count: int) -> Logits:
        """Copied from the device."""
        return self.executor.logits(first, count)

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Those that the device chose, and those for rows that it left open."""
        return [self._token(sampler, row) for sampler, row in zip(samplers, rows, strict=True)]

    def _token(self, sampler: Sampler, row: int) -> int | RequestError:
        try:
            if self.choices[row] is not None and self.chosen.covered[row]:
                return sampler.accept(int(self.chosen.tokens[row]), float(self.chosen.scores[row]))
            return sampler.sample(self.logits(row, 1)[0])
        except RequestError as error:
            return error
