"""Run a step and give each request its result: logits, or a token that was chosen where the logits are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.program import StepOutput
from llmc.runtime.executors.executor import ChoosingExecutor, Chosen, DrawingExecutor, Executor, Logits
from llmc.runtime.loop.accepted_path import AcceptedPath, move_paths
from llmc.runtime.loop.fork_orders import ForkOrders
from llmc.runtime.loop.judged_results import StepResults, with_judgement
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.requests.boundary import attempt
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.sampling.row_choice import BEST, RowChoice, RowChoices, least_wanted
from llmc.runtime.sampling.sampler import DrawRows, Sampler, choose, choose_largest
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan


def compute(executor: Executor, step: Step) -> StepResults:
    """Run a step whose tokens are chosen here."""
    return _HostResults(executor.step(step), drawing_of(executor))


def drawing_of(executor: Executor) -> DrawRows | None:
    """The executor's kernel that draws from rows that the host changed, if it has one."""
    return executor.draw if isinstance(executor, DrawingExecutor) else None


def choices_of(plan: StepPlan, scheduler: Scheduler) -> Sequence[RowChoice | None]:
    """Return how each wanted row's token is chosen on the device; None for rows whose logits are read."""
    choices = [_choice(request, scheduler) for request in plan.decodes]
    for chunk in plan.chunks:
        choices += ahead(_choice(chunk.request, scheduler) if chunk.draft.acceptance is None else None, chunk)
    return choices


def compute_choosing(executor: ChoosingExecutor, step: Step, choices: Sequence[RowChoice | None]) -> StepResults:
    """Run a step. If logits are not needed, the device chooses tokens and the logits stay there."""
    if not any(choices):
        return compute(executor, step)
    chosen = executor.choose(step, least_wanted(choices), RowChoices.of(choices))
    return device_results(executor, step, chosen, choices)


def device_results(
    executor: ChoosingExecutor, step: Step, chosen: Chosen, choices: Sequence[RowChoice | None]
) -> StepResults:
    """The results of the last step, whose tokens the device has chosen."""
    if least_wanted(choices) is StepOutput.BEST and np.isinf(chosen.scores).any():
        executor.step(step)  # It may also be NaN, which only logits show, and a step of this kind returns none.
    return _DeviceResults(executor, chosen, choices)


def usable_rows(chosen: Chosen) -> npt.NDArray[np.bool_]:
    """Return for each row whether the device's token is the request's."""
    usable: npt.NDArray[np.bool_] = chosen.covered & np.isfinite(chosen.scores)
    return usable


def _choice(request: Request, scheduler: Scheduler) -> RowChoice | None:
    """Return how the request's token is chosen; None if it has just failed."""
    choice = attempt(_CHOICE, request)
    if isinstance(choice, RequestError):
        scheduler.fail(request, choice)
        return None
    return choice


_CHOICE: Callable[[Request], RowChoice | None] = attrgetter("choice")


def ahead(choice: RowChoice | None, chunk: Chunk) -> list[RowChoice | None]:
    """Return how to choose the next token, and those after it if drafts are accepted."""
    if choice is None or choice is BEST or not chunk.draft:
        return [choice] * chunk.logit_rows
    return [choice, *(choice._replace(counters=choice.counters + depth) for depth in chunk.draft.depths())]


def publish(
    plan: StepPlan, results: StepResults, scheduler: Scheduler, move_slots: Callable[[Ints, Ints, int], None]
) -> Sequence[int | RequestError]:
    """Give every request its logits, or the tokens that were chosen from them for it, and advance the chunks.

    A request with drafts gets tokens as long as each is among the drafts at its place: the tokens that it would get one
    by one, or those that its acceptance method allows. move_slots: the executor's function, for accepted drafts that
    are not in the rows of their positions. Returns the tokens of the decodes, in order, possibly followed by others.
    """
    batch: list[SampledRequest] = plan.decodes.copy()
    rows = list(range(len(batch)))
    readers: list[tuple[Chunk, int]] = []
    drafted: list[AcceptedPath] = []
    row = decodes = len(batch)
    for chunk in plan.chunks:
        request = chunk.request
        if not chunk.draft:
            scheduler.advance(chunk, chunk.tokens)
        if not chunk.logit_rows:
            continue  # The request goes on prefilling; whether this chunk came out well shows in later logits.
        if isinstance(request, SampledRequest) and request.is_steady:
            batch.append(request)
            rows.append(row)
            if chunk.draft:
                drafted.append(AcceptedPath(chunk, request, row))
        else:
            readers.append((chunk, row))
        row += chunk.logit_rows
    if drafted:
        results = with_judgement(plan, results)
    tokens = _give(batch, rows, results, scheduler)
    if drafted:
        _follow_drafts(drafted, results, scheduler)
        # Before blocks may be released or found again.
        move_paths(drafted, scheduler.block_size, scheduler.groups, move_slots)
        for path in drafted:
            scheduler.advance(path.chunk, len(path.request.tokens) - path.chunk.start - 1)
    for request, row in zip(batch, rows, strict=True):
        if request.finished or row >= decodes:
            scheduler.settle(request)
    for chunk, row in readers:
        request = chunk.request
        if not request.finished:
            logits, orders = results.logits(row, chunk.logit_rows), ForkOrders()
            error = attempt(_read, request, request.computed - chunk.logit_rows, logits, orders)
            if error is None:
                orders.carry_out(scheduler)
            else:
                scheduler.fail(request, error)
        scheduler.settle(request)
    return tokens


def publish_decodes(
    requests: Sequence[SampledRequest], rows: Sequence[int], results: StepResults, scheduler: Scheduler
) -> Sequence[int | RequestError]:
    """Give decoding requests their tokens, and remove those that end. Returns the tokens."""
    tokens = _give(requests, rows, results, scheduler)
    for request in requests:
        if request.finished:
            scheduler.settle(request)
    return tokens


def _read(request: Request, start: int, logits: Logits, orders: ForkOrders) -> None:
    request.read(start, logits)
    request.follow(orders)


def _give(
    requests: Sequence[SampledRequest], rows: Sequence[int], results: StepResults, scheduler: Scheduler
) -> Sequence[int | RequestError]:
    """Return each request's token from its row of logits. One that has failed in this step keeps none."""
    tokens = results.tokens([request.sampler for request in requests], rows)
    for request, row, token in zip(requests, rows, tokens, strict=True):
        error: RequestError | None
        if not isinstance(token, int):
            error = token
        elif request.finished:
            continue
        else:
            logits = results.logits(row, 1)[0] if request.reads_logits else None
            error = attempt(request.accept, token, logits)
        if error is not None:
            scheduler.fail(request, error)
    return tokens


def _follow_drafts(paths: Sequence[AcceptedPath], results: StepResults, scheduler: Scheduler) -> None:
    """Continue from row to row while the token that a request got is a draft."""
    while paths := [path for path in paths if path.goes_on()]:
        _give([path.request for path in paths], [path.row for path in paths], results, scheduler)


@dataclass(frozen=True)
class _HostResults:
    all_logits: Logits
    draw: DrawRows | None

    def logits(self, first: int, count: int) -> Logits:
        """A view."""
        return self.all_logits[first : first + count]

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Chosen here."""
        if samplers and all(sampler.is_argmax for sampler in samplers):
            return choose_largest(samplers, self.all_logits, rows)
        return choose(samplers, [self.all_logits[row] for row in rows], self.draw)

    def guesses(self, first: int, count: int) -> Sequence[int]:
        """The likeliest."""
        guesses: list[int] = self.logits(first, count).argmax(1).tolist()
        return guesses


@dataclass(frozen=True)
class _DeviceResults:
    """Results of a step whose tokens the device chose. chosen: for the rows with a choice; the others' logits are
    fetched."""

    executor: ChoosingExecutor
    chosen: Chosen
    choices: Sequence[RowChoice | None]

    def logits(self, first: int, count: int) -> Logits:
        """Copy rows of logits from the device."""
        return self.executor.logits(first, count)

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """The tokens that the device chose, and those for rows that it left open or whose largest logit is NaN."""
        tokens = self.chosen.tokens.tolist()
        is_usable = usable_rows(self.chosen).tolist()
        results: list[int | RequestError] = []
        left: list[int] = []
        for index, (sampler, row) in enumerate(zip(samplers, rows, strict=True)):
            if is_usable[row] and self.choices[row] is not None:
                error = attempt(sampler.count)
                results.append(tokens[row] if error is None else error)
                continue
            left.append(index)
            results.append(0)
        if left:
            # Copies: each is fetched to the same place.
            logits = [self.logits(rows[index], 1)[0].copy() for index in left]
            chosen = choose([samplers[index] for index in left], logits, drawing_of(self.executor))
            for index, token in zip(left, chosen, strict=True):
                results[index] = token
        return results

    def guesses(self, first: int, count: int) -> Sequence[int]:
        """The device's choices, with each row's own noise."""
        guesses: list[int] = self.chosen.tokens[first : first + count].tolist()
        return guesses
