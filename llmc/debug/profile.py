"""Measure every launch of an engine's real steps, and what the cost model predicts for them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.debug.measurement_file import read_measurement
from llmc.engine_format import EngineDirectory, read_engine
from llmc.errors import EngineFormatError, OptionError, TargetError
from llmc.graph.cost import StepShape
from llmc.graph.predict import Rates, gpu_rates, launch_costs, predict_launch
from llmc.program import Launch, Limits
from llmc.runtime.engine import open_executor
from llmc.runtime.executors.executor import Executor, TimedExecutor
from llmc.runtime.request import Request
from llmc.runtime.scheduler import Chunk, StepPlan
from llmc.runtime.step import Step
from llmc.runtime.step_inputs import StepInputs
from llmc.runtime.threads import thread_count
from llmc.targets import CpuTarget, GpuTarget, resolve_target

PROFILE_VERSION = 2


@dataclass(frozen=True)
class LaunchProfile:
    """A launch of one step. launch: its index in the program. start: seconds since the step began, in the step whose
    time was the median. seconds: the median over the steps; predicted: by the cost model."""

    launch: int
    kernel: str
    start: float
    seconds: float
    predicted: float


@dataclass(frozen=True)
class StepProfile:
    """A kind of step, measured `repeats` times. seconds: the median of the whole step, of which all launches have
    their share; spread: (longest - shortest) / median. rates: measured right before; predicted: of all launches."""

    name: str
    shape: StepShape
    repeats: int
    seconds: float
    spread: float
    predicted: float
    rates: Rates
    launches: tuple[LaunchProfile, ...]


@dataclass(frozen=True)
class Profile:
    """What `llmc profile` measured. threads: of a CPU engine's steps."""

    version: int
    model: str
    target: str
    threads: int
    steps: tuple[StepProfile, ...]


@dataclass(frozen=True)
class Workload:
    """What is measured: one prompt of `prefill` tokens, and a decode of `batch` requests with `context` positions."""

    prefill: int = 512
    batch: int = 1
    context: int = 128
    repeats: int = 9


def profile_engine(
    path: Path, workload: Workload, threads: int | None, tell: Callable[[str], None] = lambda line: None
) -> Profile:
    """Run and time a prefill and decode steps.

    Raises OptionError for what the engine's limits do not allow, EngineFormatError and TargetError for an engine whose
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
    try:
        profiler = Profiler(directory, executor, blocks, count)
        tell(f"prefill of {workload.prefill} tokens")
        prefill = profiler.prefill(workload.prefill, workload.repeats)
        tell(f"decode of {workload.batch} requests at context {workload.context}")
        decode = profiler.decode(workload.batch, workload.context, workload.repeats)
    finally:
        executor.close()
    manifest = directory.manifest
    return Profile(PROFILE_VERSION, manifest.model.name, manifest.target.name, count, (prefill, decode))


def _open(directory: EngineDirectory, threads: int) -> tuple[Executor, int]:
    """The engine on what it was built for: an interpreter's times say nothing about a GPU."""
    expected = f"what each kernel should take by the GPU's data sheet: llmc report {directory.path}"
    if directory.program.kernels and os.environ.get("TRITON_INTERPRET") == "1":
        raise TargetError(
            "Triton's kernels are interpreted here, and how long that takes says nothing about a GPU",
            at="TRITON_INTERPRET=1",
            fix=f"profile on a machine with the GPU, without this variable; {expected}",
        )
    try:
        return open_executor(directory, None, None, threads)
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


def read_profile(path: Path) -> Profile:
    """A profile that `llmc profile --json` wrote. Raises EngineFormatError."""
    fix = "write it again: llmc profile ENGINE --json FILE"
    return read_measurement(Profile, path, name="profile", version=PROFILE_VERSION, fix=fix)


def check_profile(profile: Profile, directory: EngineDirectory, at: Path) -> None:
    """Raise EngineFormatError for a profile of another engine."""
    launches = directory.program.launches
    fits = all(
        each.launch < len(launches) and launches[each.launch].kernel == each.kernel
        for step in profile.steps
        for each in step.launches
    )
    if not fits or profile.target != directory.manifest.target.name:
        raise EngineFormatError(
            f"the profile is of another engine ({profile.model} for {profile.target}) than {directory.path}",
            at=at,
            fix=f"profile this one: llmc profile {directory.path} --json FILE",
        )


class Profiler:
    """An open engine that is stepped by hand. typical: what stands for several times of the same thing."""

    def __init__(
        self,
        directory: EngineDirectory,
        executor: Executor,
        blocks: int,
        threads: int,
        typical: Callable[[Sequence[float]], float] = statistics.median,
    ) -> None:
        if not isinstance(executor, TimedExecutor):
            raise EngineFormatError("this engine cannot be timed launch by launch", at=directory.path)
        self._directory, self._executor, self._blocks, self._threads = directory, executor, blocks, threads
        self._typical = typical
        self._costs = launch_costs(directory.program)
        self._inputs = StepInputs(directory.program.limits)

    def prefill(self, tokens: int, repeats: int) -> StepProfile:
        """A step that reads one prompt, whose last token's logits are wanted."""
        (sequence,) = self._sequences(1, tokens)
        step = self._inputs.fill(_chunks(Chunk(sequence, 0, tokens, 1)))
        return self._measured(f"prefill of {tokens} tokens", step, StepShape.prefill(tokens), repeats)

    def decode(self, batch: int, context: int, repeats: int) -> StepProfile:
        """A step of one more token for each of `batch` requests, after `context` tokens each, which are read first."""
        sequences = self._sequences(batch, context + 1)
        most = self._directory.program.limits.max_batch_tokens
        for sequence in sequences:
            for start in range(0, context, most):
                chunk = Chunk(sequence, start, min(most, context - start), 0)
                self._executor.step(self._inputs.fill(_chunks(chunk)))
        step = self._inputs.fill(_chunks(*(Chunk(sequence, context, 1, 1) for sequence in sequences)))
        name = f"decode, {batch} request{'s' if batch > 1 else ''} at context {context}"
        return self._measured(name, step, StepShape.decode(batch, context + 1), repeats)

    def rates(self) -> Rates:
        """What the machine delivers now."""
        target = resolve_target(self._directory.manifest.target.name)
        if isinstance(target, GpuTarget):
            return gpu_rates(target.compiled[0])
        from llmc.codegen.cpp.measured_rates import measured_rates

        assert isinstance(target, CpuTarget)
        return measured_rates(target, self._threads, self._directory.program)

    def _sequences(self, count: int, length: int) -> list[_Sequence]:
        size, vocabulary = self._directory.program.limits.block_size, self._directory.program.vocab_size
        per_sequence = -(-length // size)
        if count * per_sequence > self._blocks:
            raise OptionError(
                f"{count} requests of {length} tokens need {count * per_sequence} blocks of KV cache, "
                f"there is memory for {self._blocks}",
                fix="profile fewer or shorter requests",
            )
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, vocabulary, (count, length))
        return [_Sequence(tokens[i].tolist(), i, per_sequence) for i in range(count)]

    def _measured(self, name: str, step: Step, shape: StepShape, repeats: int) -> StepProfile:
        executor = self._executor
        assert isinstance(executor, TimedExecutor)
        rates = self.rates()
        executor.step(step)
        runs, whole = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            runs.append(executor.step_timed(step))
            whole.append(time.perf_counter() - start)
        middle = runs[whole.index(statistics.median_low(whole))]
        program, launches = self._directory.program, []
        for i, time_of in enumerate(middle):
            seconds = self._typical([run[i].seconds for run in runs])
            predicted = predict_launch(self._costs[time_of.launch], shape, rates)
            launches.append(
                LaunchProfile(
                    time_of.launch, program.launches[time_of.launch].kernel, time_of.start, seconds, predicted
                )
            )
        seconds = self._typical(whole)
        predicted = sum(each.predicted for each in launches)
        return StepProfile(
            name, shape, repeats, seconds, (max(whole) - min(whole)) / seconds, predicted, rates, tuple(launches)
        )


class _Sequence(Request):
    """Tokens with blocks, as the scheduler would give them; nobody reads the logits."""

    def __init__(self, tokens: Sequence[int], row: int, blocks: int) -> None:
        super().__init__(tokens, every_logit=False)
        self.row = row
        self.blocks = list(range(row * blocks, (row + 1) * blocks))

    def receive(self, start: int, logits: Any) -> None:
        raise NotImplementedError


def _chunks(*chunks: Chunk) -> StepPlan:
    return StepPlan([], list(chunks), {}, [], [])


def kernel_class(launch: Launch) -> str:
    """The kernel's name, and of a product its shape, which decides its time."""
    channels, rows = launch.arguments.get("in"), launch.arguments.get("out")
    return launch.kernel if channels is None else f"{launch.kernel} {channels} → {rows}"


def chrome_trace(profile: Profile, launches: Sequence[Launch]) -> dict[str, Any]:
    """The profile as a trace in Chrome's format, which Perfetto opens: a process a step, times in microseconds.

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
