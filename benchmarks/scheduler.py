"""Host time of a step: the scheduler alone, and the whole loop around an executor that computes nothing.

    python -m benchmarks.scheduler [--requests 256] [--vocab 128256]

Requests of 200 to 600 tokens run in full batches; a new one arrives for each that ends, so that steps have turnover:
blocks are allocated, registered and released, prompts are read in chunks between the decodes. The garbage collector
is on, as in a server. Prints microseconds a step of the thread's processor time, so that neighbours do not count.

scheduler: Scheduler.schedule and all that a step tells the scheduler afterwards (Scheduler.settle for each request that
starts to decode or ends), that is all of its work but `add`; the clock's own time is taken off. steady: the same of
steps in which no request starts or ends. sampling_and_publishing: the rest of the loop but filling the step's arrays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from llmc.program import Limits
from llmc.runtime.executors.executor import Logits
from llmc.runtime.generation import Ending, Generation, Origin
from llmc.runtime.sampler import Sampler
from llmc.runtime.sampling_params import SamplingParams
from llmc.runtime.scheduler import Scheduler, StepPlan
from llmc.runtime.step import Step
from llmc.runtime.step_loop import StepLoop

STEPS = 400


class StillExecutor:
    """Gives the same random logits at every step, at once."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        self._logits = generator.standard_normal((limits.max_logit_rows, vocab_size), np.float32) * 3

    def step(self, step: Step) -> Logits:
        return self._logits[: len(step.logit_rows)]

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        raise NotImplementedError("nothing forks here")

    def close(self) -> None:
        return


class Stopwatch:
    """Wraps functions and sums up the seconds in them, without those of the clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._own = min(self._empty() for _ in range(200))

    def _empty(self) -> float:
        begin = time.thread_time()
        return time.thread_time() - begin

    def __call__(self, function: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - begin - self._own

        return timed


def measure(requests: int, vocab_size: int, params: SamplingParams) -> dict[str, float]:
    """Microseconds a step: scheduler (median, 99th percentile), inputs, sampling, and the whole loop (median)."""
    limits = Limits(2048, requests, requests, 1024, 16)
    executor = StillExecutor(limits, vocab_size)
    loop = StepLoop(executor, limits, requests * 64)
    watches = {name: Stopwatch() for name in ("scheduler", "inputs", "executor")}
    scheduler: Scheduler = loop.scheduler
    for name in ("schedule", "settle"):
        setattr(scheduler, name, watches["scheduler"](getattr(scheduler, name)))
    loop._inputs.fill = watches["inputs"](loop._inputs.fill)  # type: ignore[method-assign, assignment]
    executor.step = watches["executor"](executor.step)  # type: ignore[method-assign, assignment]
    generator = np.random.default_rng(1)
    running: list[Generation] = []

    def arrive(output: int) -> None:
        prompt = generator.integers(0, vocab_size, 120)
        sampler = Sampler(params, prompt, vocab_size, np.zeros(0, np.int64))
        ending = Ending(frozenset((vocab_size,)), frozenset(), len(prompt) + output)
        running.append(Generation(prompt.tolist(), sampler, ending, origin=Origin()))
        loop.add(running[-1])

    for _ in range(requests):
        arrive(int(generator.integers(1, 480)))
    samples: dict[str, list[float]] = {name: [] for name in (*watches, "loop")}
    steady: list[float] = []
    for number in range(STEPS + 50):
        for watch in watches.values():
            watch.seconds = 0.0
        begin = time.thread_time()
        plan: StepPlan = loop.step()
        seconds = time.thread_time() - begin
        if number >= 50:
            samples["loop"].append(seconds)
            for name, watch in watches.items():
                samples[name].append(watch.seconds)
        ended = sum(request.finished for request in plan.decodes)
        if number >= 50 and not ended and not plan.chunks:
            steady.append(watches["scheduler"].seconds * 1e6)
        for _ in range(ended):
            arrive(int(generator.integers(100, 480)))
    micro = {name: np.array(values) * 1e6 for name, values in samples.items()}
    rest: npt.NDArray[np.float64] = micro["loop"] - micro["scheduler"] - micro["inputs"] - micro["executor"]
    return {
        "scheduler": statistics.median(micro["scheduler"]),
        "steady": statistics.median(steady),
        "scheduler_mean": float(micro["scheduler"].mean()),
        "scheduler_p99": float(np.percentile(micro["scheduler"], 99)),
        "inputs": statistics.median(micro["inputs"]),
        "sampling_and_publishing": statistics.median(rest),
        "loop": statistics.median(micro["loop"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sampled = partial(SamplingParams, max_tokens=4096, temperature=0.8, seed=1)
    kinds = {
        "greedy": SamplingParams(max_tokens=4096),
        "temperature": sampled(),
        "top_k=50": sampled(top_k=50),
        "top_p=0.95": sampled(top_p=0.95),
    }
    found = {name: measure(arguments.requests, arguments.vocab, params) for name, params in kinds.items()}
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{arguments.requests} running requests, vocabulary {arguments.vocab}: microseconds of host time a step")
    columns = next(iter(found.values()))
    print(" ".join(["sampling    ", *(f"{name:>24}" for name in columns)]))
    for name, values in found.items():
        print(" ".join([f"{name:12}", *(f"{value:24.1f}" for value in values.values())]))


if __name__ == "__main__":
    main()
