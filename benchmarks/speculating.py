"""Decoding with drafts whose acceptance is known: the drafter has the answer, and spoils it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from llmc.engine_format import EngineDirectory, read_engine
from llmc.prediction.step_prior import step_prior
from llmc.program import Program
from llmc.runtime.executors.executor import Executor
from llmc.runtime.executors.opening import open_executor
from llmc.runtime.executors.opening_request import CacheRoom
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin, SampledRequest
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.drafter import Drafter
from llmc.runtime.speculation.gate import Gate
from llmc.runtime.speculation.speculation import Speculation

ACCEPTANCE = 0.7
DRAFTS = 4
CONTEXT = 64
# Tokens of each request that are measured, and that are known of its answer.
STEPS = {1: 256, 16: 64, 32: 48}
KNOWN = 2 * 256 + 64


class Spoiled(Drafter):
    """answers: by a request's prompt. Each draft is right with probability `right`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocabulary: int, right: float) -> None:
        self._answers, self._vocabulary, self._right = answers, vocabulary, right
        self._random = random.Random(0)

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        """What comes next, spoiled."""
        found = []
        for request, count in zip(requests, most, strict=True):
            done = len(request.tokens) - request.prompt_tokens
            tokens = self._answers[tuple(request.tokens[:CONTEXT])][done : done + count]
            drawn = [self._spoiled(token) for token in tokens]
            found.append(Draft(drawn) if drawn else NO_DRAFT)
        return found

    def forget(self, request: SampledRequest) -> None:
        """Nothing is known of it."""

    def _spoiled(self, token: int) -> int:
        return token if self._random.random() < self._right else self._random.randrange(self._vocabulary)


class Closed(Gate):
    """Never drafts."""

    def drafts(self, requests: int, room: int) -> int:
        """None, decided as seldom as by a gate that nothing changes for."""
        self._left = (self._left or 16) - 1
        return 0


class Watched(Gate):
    """Notes how many drafts it has let through in each step."""

    def __init__(self, most: int, *priors: Any) -> None:
        super().__init__(most, *priors)
        self.counts: list[int] = []

    def drafts(self, requests: int, room: int) -> int:
        """As ever."""
        self.counts.append(super().drafts(requests, room))
        return self.counts[-1]


class StepTime(NamedTuple):
    """Seconds of a step, and of the executor in it; whether it had drafts, and what all requests got of it."""

    wall: float
    executor: float
    drafts: bool
    tokens: int


class Speculating:
    """An engine's executor, in a new loop for each run."""

    def __init__(self, path: Path, threads: int) -> None:
        self.directory: EngineDirectory = read_engine(path, check_weights=False)
        self.executor, self.blocks = open_executor(self.directory, CacheRoom(2 << 30), threads)

    def prepared(self, batch: int) -> Prepared:
        """Requests of that number, and what they will say."""
        program = self.directory.program
        prior = step_prior(program, self.directory.manifest.target.name)
        generator = np.random.default_rng(batch)
        prompts = [tuple(generator.integers(0, program.vocab_size, CONTEXT).tolist()) for _ in range(batch)]
        prepared = Prepared(self.executor, program, self.blocks, prior, prompts)
        prepared.answer()
        return prepared

    def __enter__(self) -> Speculating:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.close()


@dataclass
class Prepared:
    """Requests with prompts of CONTEXT tokens. What a run gives is seconds by tokens of all requests together."""

    executor: Executor
    program: Program
    blocks: int
    prior: Any
    prompts: list[tuple[int, ...]]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _gates: dict[float, Watched] = field(default_factory=dict)
    _plain: list[StepTime] = field(default_factory=list)
    _closed: list[StepTime] = field(default_factory=list)
    _random: list[float] = field(default_factory=list)
    _tokens_a_step: dict[float, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Tokens of each request that count."""
        return STEPS.get(len(self.prompts), 64)

    def answer(self) -> None:
        """Without speculation, as far as drafts may be asked for."""
        requests, loop = self._started(None)
        while min(len(request.output) for request in requests) < min(KNOWN, 2 * self.steps + 16):
            loop.step()
        self.answers = {tuple(request.tokens[:CONTEXT]): list(request.output) for request in requests}
        self._end(requests, loop)

    def plain(self) -> float:
        """Without speculation."""
        seconds, times = self._measure(None)
        self._plain += times
        return seconds

    def closed(self) -> float:
        """With speculation that never drafts."""
        speculation = Speculation(partial(Spoiled, self.answers, self.program.vocab_size, 1.0), DRAFTS, Closed)
        seconds, times = self._measure(speculation)
        self._closed += times
        return seconds

    def drafting(self, right: float) -> float:
        """With drafts of that acceptance, as many as the gate lets through."""
        gate = self._gates[right] = Watched(DRAFTS, self.prior)
        drafter = partial(Spoiled, self.answers, self.program.vocab_size, right)
        speculation = Speculation(drafter, DRAFTS, lambda most: gate)
        seconds, times = self._measure(speculation)
        if not right:
            usual = median(each.wall for each in times if not each.drafts)
            lost = sum(each.wall - usual * each.tokens / len(self.prompts) for each in times if each.drafts)
            self._random.append(lost / sum(each.wall for each in times))
        self._tokens_a_step[right] = speculation.stats.tokens_a_step
        return seconds

    def figures(self) -> dict[str, Any]:
        """Of the last run of each acceptance: drafts by step, the first step without, tokens of a step with drafts."""
        return {
            f"{right:g}": {
                "drafts": gate.counts,
                "off_after": next((i for i, count in enumerate(gate.counts[2:]) if not count), None),
                "tokens_a_step": self._tokens_a_step[right],
            }
            for right, gate in self._gates.items()
        }

    def costs(self) -> dict[str, float]:
        """What machines whose speed changes from run to run do not hide, of the time without speculation: what steps
        take more beside the executor where drafts never pay; and what random drafts lose, by the other steps of their
        own runs."""
        found = {}
        if self._closed:
            beside = [median(each.wall - each.executor for each in times) for times in (self._closed, self._plain)]
            found["never drafts"] = (beside[0] - beside[1]) / median(each.wall for each in self._plain)
        if self._random:
            found["random drafts"] = median(self._random)
        return found

    def _measure(self, speculation: Speculation | None) -> tuple[float, list[StepTime]]:
        requests, loop = self._started(speculation)
        times: list[StepTime] = []
        wanted = self._written(requests) + self.steps * len(requests)
        before, begin = self._written(requests), time.perf_counter()
        while (done := self._written(requests)) < wanted:
            start = time.perf_counter()
            plan = loop.step()
            wall, drafts = time.perf_counter() - start, any(chunk.draft for chunk in plan.chunks)
            times.append(StepTime(wall, loop.executor_seconds, drafts, self._written(requests) - done))
        seconds = time.perf_counter() - begin
        for request in requests:
            known = self.answers[tuple(request.tokens[:CONTEXT])]
            assert list(request.output)[: len(known)] == known[: len(request.output)], "speculation changed an answer"
        written = self._written(requests) - before
        self._end(requests, loop)
        return seconds / written, times

    def _started(self, speculation: Speculation | None) -> tuple[list[Generation], StepLoop]:
        """Requests that have their first token."""
        loop = StepLoop(self.executor, self.program.limits, self.blocks, program=self.program, speculation=speculation)
        requests = [self._request(prompt) for prompt in self.prompts]
        for request in requests:
            loop.add(request)
        while not all(request.output for request in requests):
            loop.step()
        return requests, loop

    def _request(self, prompt: tuple[int, ...]) -> Generation:
        sampler = Sampler(SamplingParams(), np.array(prompt), self.program.vocab_size, np.zeros(0, np.int64))
        ending = Ending(frozenset(), frozenset(), self.program.limits.max_model_len)
        return Generation(prompt, sampler, ending, origin=Origin(salt=None))

    def _written(self, requests: Sequence[Generation]) -> int:
        return sum(len(request.tokens) for request in requests)

    def _end(self, requests: Sequence[Generation], loop: StepLoop) -> None:
        for request in requests:
            loop.remove(request)
