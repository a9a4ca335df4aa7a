"""Host time of a step: the scheduler alone, and the whole loop around an executor that computes nothing.

    python -m benchmarks.scheduler [--requests 256] [--vocab 4096]

Requests of 200 to 600 tokens run in full batches; a new one arrives for each that ends, so that steps have turnover:
blocks are allocated, registered and released, prompts are read in chunks between the decodes. Measuring begins when
the pool is full of cached blocks, as it is in a server that has run for a while: every new block has to be taken from
what was cached. The garbage collector is on. Prints microseconds a step of the thread's processor time.

scheduler: Scheduler.schedule and all that a step tells the scheduler afterwards (Scheduler.settle for each request that
starts to decode or ends), that is all of its work but `add`; the clock's own time is taken off. Prompts are hashed
before they come to the scheduler, as JobBuilder does it. steady: the same of steps in which no request starts or ends;
turnover: of those in which one does. inputs: filling the step's arrays. publishing: the rest of the loop; the
executor chooses the tokens, as those of CPU and GPU engines do. As it reads no weights, the processor's caches are
warmer than beside a model. slowdown: how much longer a fixed piece of Python takes in the median than at its fastest,
measured after each step: above 1 where neighbours share the core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from llmc.program import Limits, StepOutput
from llmc.runtime.executors.executor import Chosen, Logits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.prefix_cache.block_digests import BlockDigests
from llmc.runtime.prefix_cache.prefix_cache import hash_prompt
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.row_choice import RowChoices
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.scheduling.step_plan import StepPlan

STEPS = 1000
# Requests hold 22 blocks in the mean, and 38 at most.
BLOCKS_PER_REQUEST = 40


class StillExecutor:
    """Chooses the same token in every row, at once."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        rows = limits.max_logit_rows
        self._logits = np.zeros((1, vocab_size), np.float32)
        self._chosen = Chosen(np.full(rows, 5, np.int32), np.zeros(rows, np.float32), np.ones(rows, np.bool_))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        return self._chosen

    def step(self, step: Step) -> Logits:
        return self.logits(0, len(step.logit_rows))

    def logits(self, first: int, count: int) -> Logits:
        return np.repeat(self._logits, count, axis=0)

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        """Nothing forks here, and no block holds anything."""

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        """No block holds anything."""

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


def probe() -> float:
    """Seconds that some Python takes which is always the same."""
    begin = time.thread_time()
    seen: dict[int, int] = {}
    for number in range(500):
        seen[number * 7919 % 1009] = len(seen)
    return time.thread_time() - begin


def measure(requests: int, vocab_size: int, params: SamplingParams) -> dict[str, float]:
    """Microseconds a step: medians but for scheduler_mean and scheduler_p99."""
    limits = Limits(2048, requests, requests, 1024, 16)
    executor = StillExecutor(limits, vocab_size)
    loop = StepLoop(executor, limits, requests * BLOCKS_PER_REQUEST, program=None)
    digests = BlockDigests(limits.block_size)
    watches = {name: Stopwatch() for name in ("scheduler", "inputs", "executor")}
    watched: tuple[tuple[object, str, str], ...] = (
        (loop.scheduler, "schedule", "scheduler"),
        (loop.scheduler, "settle", "scheduler"),
        (loop._inputs, "fill", "inputs"),
        (executor, "choose", "executor"),
    )
    for owner, method, part in watched:
        setattr(owner, method, watches[part](getattr(owner, method)))
    generator = np.random.default_rng(1)

    def arrive(output: int) -> None:
        prompt = generator.integers(0, vocab_size, 120)
        sampler = Sampler(params, prompt, vocab_size, np.zeros(0, np.int64))
        ending = Ending(frozenset((vocab_size,)), frozenset(), len(prompt) + output)
        request = Generation(prompt.tolist(), sampler, ending, origin=Origin())
        hash_prompt(request, digests)
        loop.add(request)

    for _ in range(requests):
        arrive(int(generator.integers(1, 480)))
    samples: dict[str, list[float]] = {name: [] for name in (*watches, "loop")}
    steady: list[float] = []
    turnover: list[float] = []
    probes: list[float] = []
    while len(samples["loop"]) < STEPS:
        is_full = not loop.pool.free
        for watch in watches.values():
            watch.seconds = 0.0
        begin = time.thread_time()
        plan: StepPlan = loop.step()
        seconds = time.thread_time() - begin
        ended = sum(request.finished for request in plan.decodes)
        if is_full:
            (turnover if ended or plan.chunks else steady).append(watches["scheduler"].seconds * 1e6)
            samples["loop"].append(seconds)
            probes.append(probe())
            for name, watch in watches.items():
                samples[name].append(watch.seconds)
        for _ in range(ended):
            arrive(int(generator.integers(100, 480)))
    micro = {name: np.array(values) * 1e6 for name, values in samples.items()}
    rest: npt.NDArray[np.float64] = micro["loop"] - micro["scheduler"] - micro["inputs"] - micro["executor"]
    return {
        "scheduler": statistics.median(micro["scheduler"]),
        "steady": statistics.median(steady),
        "turnover": statistics.median(turnover),
        "scheduler_mean": float(micro["scheduler"].mean()),
        "scheduler_p99": float(np.percentile(micro["scheduler"], 99)),
        "inputs": statistics.median(micro["inputs"]),
        "publishing": statistics.median(rest),
        "loop": statistics.median(micro["loop"]),
        "slowdown": statistics.median(probes) / min(probes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kinds = {
        "greedy": SamplingParams(max_tokens=4096),
        "top_p=0.95": SamplingParams(max_tokens=4096, temperature=0.8, seed=1, top_p=0.95),
    }
    found = {name: measure(arguments.requests, arguments.vocab, params) for name, params in kinds.items()}
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{arguments.requests} running requests, vocabulary {arguments.vocab}: microseconds of host time a step")
    columns = next(iter(found.values()))
    print(" ".join(["sampling    ", *(f"{name:>15}" for name in columns)]))
    for name, values in found.items():
        print(" ".join([f"{name:12}", *(f"{value:15.1f}" for value in values.values())]))


if __name__ == "__main__":
    main()
