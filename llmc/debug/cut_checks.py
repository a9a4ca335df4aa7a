"""Checks of a cut pipeline for a bisection: its logits, a command of the user, or the time of a decode step."""

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from llmc.debug.bisect import Outcome, Pipeline, cut_graph
from llmc.debug.difference import difference
from llmc.debug.memo_run import MemoRun
from llmc.errors import LlmcError, OptionError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.graph.render import render
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.settings import BISECT_PREFIX

# Builds the engine of the pipeline cut after that many rewrites, followed by the passes that every engine needs.
BuildCut = Callable[[int, Path], None]
_TAIL = 300
# Decode steps per measurement, and measurements per engine, which alternate between the engines.
_STEPS = 24
_ROUNDS = 5


@dataclass(frozen=True)
class LogitCheck:
    """The logits stay within `tolerance` of a reference: max |Δ| over the reference's spread. A crash fails.

    lossy: (number, budget) of passes that may change more, from their first rewrite on.
    """

    pipeline: Pipeline
    runner: MemoRun
    reference: Tensor
    tolerance: float
    lossy: tuple[tuple[int, float], ...] = ()

    def __call__(self, number: int) -> Outcome:
        """Compare the logits of the graph after `number` rewrites with the reference."""
        try:
            logits = self.runner.logits(cut_graph(self.pipeline, number))
        except LlmcError as error:
            return Outcome(False, error.problem)
        change = difference(logits, self.reference)
        figures = f"relative difference {change.relative:.1e}, top-1 {change.top1:.1%}"
        allowed = max([self.tolerance, *(budget for first, budget in self.lossy if number >= first)])
        return Outcome(change.within(allowed), figures)


@dataclass(frozen=True)
class CommandCheck:
    """A check by a shell command, which holds if the command exits with 0.

    It finds in its environment LLMC_BISECT_NUMBER, LLMC_BISECT_GRAPH (the graph's text), LLMC_BISECT_LOGITS (a
    safetensors file with `tokens` and `logits`, the latter missing where the graph does not run) and, if build is
    given, LLMC_BISECT_ENGINE. {number}, {graph}, {logits} and {engine} in the command stand for the same.
    """

    command: str
    pipeline: Pipeline
    runner: MemoRun
    build: BuildCut | None = None
    timeout: float | None = None

    def __call__(self, number: int) -> Outcome:
        """Make the cut and run the command on it."""
        with ScratchDirectory() as directory:
            try:
                values = {"number": str(number), **self._files(number, directory)}
            except LlmcError as error:
                return Outcome(False, error.problem)
            command = self.command
            for name, value in values.items():
                command = command.replace(f"{{{name}}}", value)
            environment = {BISECT_PREFIX + name.upper(): value for name, value in values.items()}
            try:
                done = subprocess.run(
                    command, shell=True, env={**os.environ, **environment}, capture_output=True, timeout=self.timeout
                )
            except subprocess.TimeoutExpired:
                return Outcome(False, f"the command took longer than {self.timeout} s")
            except OSError as error:
                raise OptionError(f"the command cannot be run: {error}", at=f"--check {self.command}") from None
        if done.returncode in (126, 127):
            raise OptionError(
                f"the command cannot be run: {_tail(done.stderr)}",
                at=f"--check {self.command}",
                fix="name a command that the shell finds",
            )
        return Outcome(
            done.returncode == 0, f"exit code {done.returncode} {_tail(done.stderr or done.stdout)}".rstrip()
        )

    def _files(self, number: int, directory: Path) -> dict[str, str]:
        if self.build is not None:
            engine = directory / "cut.llmc"
            self.build(number, engine)
            return {"engine": str(engine)}
        from safetensors.torch import save_file

        graph = cut_graph(self.pipeline, number)
        text, tensors = directory / "graph.txt", directory / "logits.safetensors"
        text.write_text(render(graph), encoding="utf-8")
        content = {"tokens": torch.tensor(self.runner.tokens)}
        with contextlib.suppress(LlmcError):  # The command sees that there are none, and decides.
            content["logits"] = self.runner.logits(graph).contiguous()
        save_file(content, tensors)
        return {"graph": str(text), "logits": str(tensors)}


@dataclass
class SpeedCheck:
    """A check of speed: a decode step of the cut takes at most `ratio` times as long as one after `baseline`
    rewrites."""

    build: BuildCut
    tokens: Sequence[int]
    ratio: float
    baseline: int
    directory: Path
    _engines: dict[int, Path] = field(default_factory=dict)

    def __call__(self, number: int) -> Outcome:
        """Build the cut engine and measure it and the baseline alternately."""
        if number == self.baseline:
            return Outcome(True, "the baseline")
        try:
            paths = [self._engine(n) for n in (self.baseline, number)]
        except LlmcError as error:
            return Outcome(False, error.problem)
        before, after = decode_seconds(paths, self.tokens)
        ratio = after / before
        detail = f"{after * 1e6:.0f} µs a decode step, {ratio:.2f} × the {before * 1e6:.0f} µs of #{self.baseline}"
        return Outcome(ratio <= self.ratio, detail)

    def _engine(self, number: int) -> Path:
        if number not in self._engines:
            path = self.directory / f"cut-{number}.llmc"
            self.build(number, path)
            self._engines[number] = path
        return self._engines[number]


def decode_seconds(engines: Sequence[Path], tokens: Sequence[int]) -> list[float]:
    """Seconds of a decode step of each engine: the median over rounds, each of which measures every engine once."""
    params = SamplingParams(max_tokens=_STEPS + 1, temperature=0.0, ignore_eos=True)
    rounds: list[list[float]] = [[] for _ in engines]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(load(path, check_weights=False)) for path in engines]
        for turn in range(_ROUNDS + 1):
            for engine, seconds in zip(opened, rounds, strict=True):
                stream = engine.stream(list(tokens[:8]), params)
                first = next(stream)
                start = time.perf_counter()
                *_, last = stream
                if turn:  # The first one warms up.
                    seconds.append((time.perf_counter() - start) / (last.tokens - first.tokens))
    return [statistics.median(seconds) for seconds in rounds]


def _tail(output: bytes) -> str:
    return " ".join(output.decode("utf-8", "replace").split())[-_TAIL:]
