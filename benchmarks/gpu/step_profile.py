"""Steps of an engine on a GPU: wall time, the GPU's time from the first kernel to the last, and each kernel's.

    python -m benchmarks.gpu_models build engines --target h200              # on any machine
    python -m benchmarks.gpu.step_profile engines/llama-3.1-8b.llmc          # on the GPU; half a minute

Weights are drawn on the device (weightless.py), and the cache is filled with random numbers. Kernels that start early
(docs/gpu.md) wait inside the time of their launch, so their times add up to more than the GPU's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.weightless import open_weightless
from benchmarks.gpu.workloads import Decode, Prefill
from llmc.engine_format import read_engine
from llmc.program import StepOutput
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoices

WORKLOADS = (Decode(1, 1024), Decode(8, 1024), Decode(32, 1024), Decode(1, 8192), Decode(32, 8192), Prefill(512))
WARM_UP, ROUNDS, PROFILED = 4, 3, 3


@dataclass(frozen=True)
class StepProfile:
    """wall_seconds: of a step, the median of rounds. gpu_seconds: from the first kernel's start to the last one's end.
    kernels: by name, how many there are and the sum of their microseconds."""

    engine: str
    step: str
    wall_seconds: float
    gpu_seconds: float
    kernels: dict[str, tuple[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="an engine without weights, of benchmarks.gpu_models build")
    parser.add_argument("--json", type=Path, help="also write the profiles there")
    arguments = parser.parse_args()
    directory = read_engine(arguments.engine, check_weights=False)
    executor, blocks = open_weightless(directory)
    fill_cache(executor)
    found = []
    for work in WORKLOADS:
        step = step_of(work, blocks, directory.program.limits.block_size, directory.program.vocab_size)
        found.append(step_profile(executor, step, arguments.engine.name, work.name))
        tell(found[-1])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def step_of(work: Decode | Prefill, blocks: int, block_size: int, vocab_size: int) -> Step:
    """The step in which all requests have that context, their blocks spread over the cache."""
    requests, context = (work.batch, work.context) if isinstance(work, Decode) else (1, work.tokens)
    tokens = 1 if isinstance(work, Decode) else work.tokens
    random = np.random.default_rng(0)
    columns = -(-context // block_size)
    tables = random.permutation(blocks)[: requests * columns].reshape(requests, columns).astype(np.int32)
    places = np.tile(np.arange(context - tokens, context), requests)
    owners = np.repeat(np.arange(requests), tokens)
    ends = np.arange(1, requests + 1) * tokens
    return Step(
        input_ids=random.integers(0, vocab_size, len(places)).astype(np.int32),
        positions=places.astype(np.int32),
        slot_mapping=(tables[owners, places // block_size] * block_size + places % block_size).astype(np.int32),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=np.full(requests, context, np.int32),
        block_tables=tables,
        logit_rows=(ends - 1).astype(np.int32),
        tree_masks=np.zeros(len(places), np.int64),
    )


def fill_cache(executor: CudaExecutor) -> None:
    """Random numbers in bf16: zeros would make softmax and memory faster."""
    for (space, _), (memory, _) in executor._spaces.items():
        if space == "cache":
            for part in memory[: memory.numel() // 2 * 2].view(torch.bfloat16).split(1 << 30):
                part.normal_()


def step_profile(executor: CudaExecutor, step: Step, engine: str, name: str) -> StepProfile:
    """Measure the step, which chooses the likeliest tokens."""
    choices = RowChoices.of([BEST] * len(step.logit_rows))

    def run() -> None:
        executor.choose(step, StepOutput.BEST, choices)

    for _ in range(WARM_UP):
        run()
    count, walls = 20 if len(step.input_ids) == len(step.context_lens) else 3, []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        walls.append((time.perf_counter() - begin) / count)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            run()
    events: list[Any] = sorted(profiled.events(), key=lambda event: event.time_range.start)
    kernels = [e for e in events if "Mem" not in e.name and str(e.device_type).endswith("CUDA")]
    last = kernels[-(len(kernels) // PROFILED) :]
    counts, sums = Counter(event.name for event in last), defaultdict[str, float](float)
    for event in last:
        sums[event.name] += event.time_range.elapsed_us()
    span = max(e.time_range.end for e in last) - last[0].time_range.start
    return StepProfile(engine, name, sorted(walls)[ROUNDS // 2], span / 1e6, {n: (counts[n], sums[n]) for n in counts})


def tell(found: StepProfile) -> None:
    """Print it."""
    wall, gpu = found.wall_seconds * 1e3, found.gpu_seconds * 1e3
    print(f"{found.engine}, {found.step}: {wall:.3f} ms, of which {gpu:.3f} ms on the GPU", flush=True)
    for name, (count, microseconds) in sorted(found.kernels.items(), key=lambda item: -item[1][1]):
        print(f"{microseconds:12.1f} us {count:5d} × {microseconds / count:8.2f}  {name[:60]}", flush=True)


if __name__ == "__main__":
    main()
