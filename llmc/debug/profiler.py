"""Measure every launch of an engine's real steps."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmc.debug.target_rates import target_rates
from llmc.engine_format import EngineDirectory, read_engine
from llmc.errors import EngineFormatError, OptionError, TargetError
from llmc.plural import counted
from llmc.prediction.launch_cost import launch_costs
from llmc.prediction.launch_time import predict_launch
from llmc.prediction.rates import Rates
from llmc.prediction.step_launches import step_launches
from llmc.prediction.step_shape import StepShape
from llmc.program import Limits
from llmc.report.profile import PROFILE_VERSION, LaunchProfile, Profile, StepProfile
from llmc.runtime.executors.executor import Executor, StateExecutor, TimedExecutor
from llmc.runtime.executors.opening import open_executor
from llmc.runtime.executors.opening_request import CacheRoom
from llmc.runtime.loop.step_inputs import StatefulStepInputs, StepInputs
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.requests.request_state import Standing
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan
from llmc.runtime.threads import thread_count
from llmc.targets import resolve_target


@dataclass(frozen=True)
class Workload:
    """The steps to measure: one prompt of `prefill` tokens, and a decode of `batch` requests with `context`
    positions."""

    prefill: int = 512
    batch: int = 1
    context: int = 128
    repeats: int = 9


@dataclass(frozen=True)
class PreparedStep:
    """A step whose requests have their blocks, and in them what it reads of earlier tokens."""

    name: str
    plan: StepPlan
    shape: StepShape


def profile_engine(
    path: Path, workload: Workload, threads: int | None, tell: Callable[[str], None] = lambda line: None
) -> Profile:
    """Run and time a prefill and decode steps.

    Raises OptionError if the workload exceeds the engine's limits, EngineFormatError or TargetError if the engine's
    kernels do not run here.
    """
    directory = read_engine(path, check_weights=False)
    check_workload(workload, directory.program.limits)
    if not directory.program.launches:
        raise EngineFormatError(
            "a reference engine runs its graph in torch: it has no kernels to time",
            at=path,
            fix="build it for this machine and profile that: llmc build MODEL --target cpu -o ENGINE",
        )
    count = thread_count(threads)
    executor, blocks = _open(directory, count)
    with closing(executor):
        steps = []
        for is_prefill in (True, False):
            profiler = Profiler(directory, executor, blocks, count)  # Each step may take all blocks.
            if is_prefill:
                prepared = profiler.prefill(workload.prefill)
            else:
                prepared = profiler.decode(workload.batch, workload.context)
            tell(prepared.name)
            steps.append(profiler.measure(prepared, workload.repeats))
    manifest = directory.manifest
    return Profile(PROFILE_VERSION, manifest.model.name, manifest.target.name, count, tuple(steps))


def _open(directory: EngineDirectory, threads: int) -> tuple[Executor, int]:
    """The engine on what it was built for: an interpreter's times say nothing about a GPU."""
    expected = f"what each kernel should take by the GPU's data sheet: llmc report {directory.path}"
    if directory.program.kernels and os.environ.get("TRITON_INTERPRET") == "1":
        raise TargetError(
            "Triton's kernels are interpreted here, so their times say nothing about a GPU",
            at="TRITON_INTERPRET=1",
            fix=f"profile on a machine with the GPU, without this variable; {expected}",
        )
    try:
        return open_executor(directory.with_one_table(), CacheRoom(), threads)
    except TargetError as error:
        if not directory.program.kernels:
            raise
        raise TargetError(error.problem, at=error.at, fix=f"{error.fix}; {expected}") from None


def check_workload(workload: Workload, limits: Limits) -> None:
    """Raise OptionError for a workload that is larger than the engine's steps."""
    longest = min(limits.max_batch_tokens, limits.max_model_len)
    batch = min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows)
    for name, value, most in (
        ("prefill", workload.prefill, longest),
        ("batch", workload.batch, batch),
        ("context", workload.context, limits.max_model_len - 1),
        ("repeats", workload.repeats, 10_000),
    ):
        if not 1 <= value <= most:
            raise OptionError(
                f"{name} cannot be {value}: this engine's steps allow 1 to {most}",
                at=f"--{name}={value}",
                fix=f"give a number from 1 to {most}, or build with larger limits",
            )


class Profiler:
    """An open engine whose steps are run one by one. Steps are prepared, each with its own KV blocks, and can then be
    measured repeatedly. typical: reduces several times of the same step to one, such as the median."""

    def __init__(
        self,
        directory: EngineDirectory,
        executor: Executor,
        blocks: int,
        threads: int,
        typical: Callable[[Sequence[float]], float] = statistics.median,
    ) -> None:
        if not isinstance(executor, TimedExecutor):
            raise EngineFormatError(
                "this engine cannot be timed launch by launch", at=directory.path, fix="profile an engine of one rank"
            )
        self._directory, self._executor, self._blocks, self._threads = directory, executor, blocks, threads
        self._typical = typical
        self._taken = 0
        self._costs = launch_costs(directory.program)
        inputs = StatefulStepInputs if directory.program.states else StepInputs
        self._inputs = inputs(directory.program.limits)

    def prefill(self, tokens: int) -> PreparedStep:
        """A step that reads one prompt, whose last token's logits are wanted."""
        (sequence,) = self._sequences(1, tokens)
        chunk = Chunk(sequence, 0, tokens, 1)
        return PreparedStep(f"prefill of {counted(tokens, 'token')}", _plan(chunk), StepShape.prefill(tokens))

    def decode(self, batch: int, context: int) -> PreparedStep:
        """A step of one more token for each of `batch` requests after the same `context` tokens, which are read now."""
        first, *others = self._sequences(batch, context + 1)
        most = self._directory.program.limits.max_batch_tokens
        for start in range(0, context, most):
            chunk = Chunk(first, start, min(most, context - start), 0)
            self._executor.step(self._inputs.fill(_plan(chunk)))
        for other in others:
            self._executor.copy_blocks(dict(zip(other.standing.blocks, first.standing.blocks, strict=True)))
            if self._directory.program.states and isinstance(self._executor, StateExecutor):
                self._executor.copy_states(first.seat, other.seat)
        plan = _plan(*(Chunk(sequence, context, 1, 1) for sequence in (first, *others)))
        name = f"decode, {batch} request{'s' if batch > 1 else ''} at context {context}"
        return PreparedStep(name, plan, StepShape.decode(batch, context + 1))

    def measure(self, prepared: PreparedStep, repeats: int) -> StepProfile:
        """Measure the machine, run the step once to warm up, then measure `repeats` runs."""
        executor, shape = self._executor, prepared.shape
        assert isinstance(executor, TimedExecutor)
        rates = self.rates()
        step = self._inputs.fill(prepared.plan)
        executor.step(step)
        runs, whole = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            runs.append(executor.step_timed(step))
            whole.append(time.perf_counter() - start)
        middle = runs[whole.index(statistics.median_low(whole))]
        program, launches = self._directory.program, []
        parts_of, without_start = dict(step_launches(program.launches, shape)), replace(rates, launch=0.0)
        for i, time_of in enumerate(middle):
            seconds = self._typical([run[i].seconds for run in runs])
            own = time_of.launch
            predicted = sum(
                predict_launch(self._costs[part], shape, rates if part == own else without_start)
                for part in parts_of.get(own, (own,))
            )
            launches.append(
                LaunchProfile(
                    time_of.launch, program.launches[time_of.launch].kernel, time_of.start, seconds, predicted
                )
            )
        seconds = self._typical(whole)
        predicted = sum(launch.predicted for launch in launches)
        spread = (max(whole) - min(whole)) / seconds
        return StepProfile(prepared.name, shape, repeats, seconds, spread, predicted, rates, tuple(launches))

    def rates(self) -> Rates:
        """The rates that the machine delivers now."""
        target = resolve_target(self._directory.manifest.target.name)
        rates = target_rates(target, self._directory.program, self._threads)
        assert rates is not None  # It has run a step.
        return rates

    def _sequences(self, count: int, length: int) -> "list[_Sequence]":
        """Random tokens; all but the last are the same for all."""
        size, vocabulary = self._directory.program.limits.block_size, self._directory.manifest.model.vocab_size
        per_sequence = -(-length // size)
        if self._taken + count * per_sequence > self._blocks:
            raise OptionError(
                f"{counted(count, 'request')} of {counted(length, 'token')} would take "
                f"{counted(count * per_sequence, 'block')} of KV cache, and there is "
                f"memory for {self._blocks - self._taken}",
                fix="profile fewer or shorter requests",
            )
        starts = range(self._taken, self._taken + count * per_sequence, per_sequence)
        self._taken = starts.stop
        tokens: list[int] = np.random.default_rng(0).integers(0, vocabulary, length + count).tolist()
        shared, last = tokens[: length - 1], tokens[length:]
        return [
            _Sequence([*shared, own], range(start, start + per_sequence), seat)
            for seat, (own, start) in enumerate(zip(last, starts, strict=True))
        ]


class _Sequence(Request):
    """Tokens with blocks and a seat, as the scheduler would assign them; the logits are discarded."""

    def __init__(self, tokens: Sequence[int], blocks: range, seat: int) -> None:
        super().__init__(tokens, every_logit=False, origin=Origin())
        self.seat = seat
        self.standing = Standing(blocks=list(blocks), seat=seat)

    def receive(self, start: int, logits: Any) -> None:
        """Do nothing: steps are run for their times, and the logits after random tokens are meaningless."""


def _plan(*chunks: Chunk) -> StepPlan:
    return StepPlan([], list(chunks), {}, [], [], {})
