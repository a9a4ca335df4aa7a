"""The ways to compute a node that an engine carries (program.Alternative), each in the largest step that has it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.codegen.triton.compile import Workers
from llmc.processes.processors import usable_processors
from llmc.program import Alternative, Launch, Program
from llmc.targets import GpuTarget
from llmc.tuning.choice import Tuned, fastest
from llmc.tuning.steps import shape_of, with_inputs_of
from llmc.tuning.timing import LAUNCHES, ROUNDS, timed

if TYPE_CHECKING:
    from llmc.runtime.device.inputs import StepShape
    from llmc.runtime.executors.cuda import CudaExecutor


def compile_alternatives(program: Program, target: GpuTarget, scratch: Path) -> tuple[Program, tuple[Alternative, ...]]:
    """The program with binaries for kernels that only alternatives launch, and the alternatives that compile without
    spills."""
    folder = str(Path(next(iter(program.launched_kernels()[0].binaries.values())).file).parent)
    missing = [kernel for kernel in program.kernels if not kernel.is_library and not kernel.binaries]
    with Workers(usable_processors()) as workers:
        compiled = workers.compile_usable(missing, target, scratch, folder)
    ready = {kernel.name: kernel for kernel in compiled if kernel is not None}
    kernels = tuple(ready.get(kernel.name, kernel) for kernel in program.kernels)
    good = {kernel.name for kernel in kernels if kernel.binaries or kernel.is_library}
    usable = tuple(a for a in program.alternatives if all(launch.kernel in good for launch in a.launches))
    return replace(program, kernels=kernels), usable


def choose_ways(
    program: Program,
    usable: Sequence[Alternative],
    seconds: Callable[[Sequence[Launch], StepShape], float],
    tell: Callable[[str], None],
) -> tuple[list[Alternative], tuple[Tuned, ...]]:
    """Measure the alternatives of each site, and return those that are faster than the launched kernels.

    Args:
        program: The program whose launches are tuned.
        usable: The alternatives whose kernels compiled.
        seconds: Measures launches at a shape.
        tell: Called with one line per site.

    Returns:
        The fastest alternative of each site where one is faster, and a record of every site.
    """
    sites: dict[tuple[int, int], list[Alternative]] = {}
    for alternative in usable:
        sites.setdefault((alternative.first, alternative.last), []).append(alternative)
    winners, results = [], []
    kernels = {kernel.name: kernel for kernel in program.kernels}
    for (first, last), others in sites.items():
        own = program.launches[first : last + 1]
        shape = with_inputs_of(program, shape_of(own[0].only, program.limits))
        measured = {"own": seconds(own, shape)} | {str(i): seconds(a.launches, shape) for i, a in enumerate(others)}
        best = fastest(measured, "own")
        launches = own if best == "own" else others[int(best)].launches
        if best != "own":
            winners.append(others[int(best)])
        names = " + ".join(launch.kernel for launch in launches)
        kernel = kernels[launches[-1].kernel]
        before = " + ".join(launch.kernel for launch in own)
        tuned = Tuned(before, names, measured["own"], measured[best], kernel.num_warps, kernel.num_stages)
        results.append(tuned)
        tell(f"{before}: {tuned.before * 1e6:.1f} µs; {names}: {tuned.after * 1e6:.1f} µs")
    return winners, tuple(results)


def seconds_of(executor: CudaExecutor, launches: Sequence[Launch], shape: StepShape, scratch: Path) -> float:
    """Median seconds of consecutive launches."""
    import torch

    from llmc.runtime.executors.cuda_driver import load_kernel

    executor.load_example(shape)
    calls = [(call, call.programs(shape.counts())) for call in executor.plan(launches)]
    loaded = {
        call.kernel.name: load_kernel(next(iter(call.kernel.binaries.values())), scratch)
        for call, _ in calls
        if not call.kernel.is_library
    }
    stream = torch.cuda.current_stream().cuda_stream
    bound = [executor.bound(call, grid, shape, loaded.get(call.kernel.name)) for call, grid in calls]

    def run() -> None:
        for launch in bound:
            launch(stream)

    return statistics.median(timed(run, LAUNCHES * ROUNDS))
