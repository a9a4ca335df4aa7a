"""Time of the host per step of an engine for GPUs, on a stand-in for the device: Python's part, without CUDA.

    python -m benchmarks.gpu.host_time out.llmc

Launches of kernels do nothing; products of the library are left out. Shapes of prompts are new in every step; with
LLMC_PROMPT_GRAPHS=1 they are padded to buckets, as graphs are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.engine_format import read_engine
from llmc.program import Program, StepOutput
from llmc.runtime.device.inputs import StepShape, example_step
from llmc.runtime.device.prompt_inputs import prompt_sizes
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.row_choice import BEST, RowChoices
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.settings import settings
from llmc.targets import gpu_target
from tests.runtime.executors.fake_device import fake_executor

ROUNDS, WARM_UP = 200, 10
CONTEXT = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="of one rank; its weights are not read")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    engine = read_engine(arguments.engine, check_weights=False, check_machine=False)
    program = engine.program
    target = gpu_target(engine.manifest.target.name)
    prompts = prompt_sizes(program, target) if settings().prompt_graphs else None
    blocks = program.limits.max_sequences * program.limits.blocks_for(CONTEXT + WARM_UP + 2 * ROUNDS)
    with pytest.MonkeyPatch.context() as patch:
        executor, driver = fake_executor(program, blocks, patch, prompts=prompts)
        for name in ("cuLaunchKernel", "cuLaunchKernelEx"):
            patch.setattr(driver, name, lambda *given: (0,))
        patch.setattr(driver, "do", lambda work: None)
        patch.setattr(torch, "mm", lambda x, weight, out: out)
        found = {f"prompt of {tokens} tokens": prompt(executor, program, blocks, tokens) for tokens in (128, 512)}
        for batch in (1, program.limits.max_sequences):
            found |= decode(executor, program, blocks, batch)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, seconds in found.items():
            print(f"{name}: {seconds * 1e6:.0f} µs")


def prompt(executor: CudaExecutor, program: Program, blocks: int, tokens: int) -> float:
    """Seconds per step of a prompt in the executor."""
    columns = program.limits.blocks_for(program.limits.max_model_len) + 1
    shapes = [StepShape(tokens + i % 100, 1, 1, columns) for i in range(ROUNDS)]
    steps = iter([example_step(shape, program.limits, blocks) for shape in shapes])
    choices = RowChoices.of([BEST])
    return least(lambda: executor.choose(next(steps), StepOutput.BEST, choices))


def decode(executor: CudaExecutor, program: Program, blocks: int, batch: int) -> dict[str, float]:
    """Seconds per step of the whole loop, and of the part that it spends in the executor."""
    loop = StepLoop(executor, program.limits, blocks, program=program)
    end = Ending(frozenset(), frozenset(), program.limits.max_model_len)
    for index in range(batch):
        tokens = np.full(CONTEXT, index % program.vocab_size)
        sampler = Sampler(SamplingParams(), tokens, program.vocab_size, np.zeros(0, np.int64))
        loop.add(Generation(tokens.tolist(), sampler, end, origin=Origin(salt=None)))
    while len(loop.step().decodes) < batch:
        pass
    parts: list[float] = []

    def step() -> None:
        loop.step()
        parts.append(loop.executor_seconds)

    whole = least(step)
    loop.renewed()
    return {f"decode, batch {batch}, loop": whole, f"decode, batch {batch}, its executor": min(parts[WARM_UP:])}


def least(run: Callable[[], object]) -> float:
    """The least seconds of a run: how long it takes undisturbed, on a machine with other work."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[WARM_UP:])


if __name__ == "__main__":
    main()
