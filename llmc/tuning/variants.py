"""Variants of an engine's kernels, compiled for other numbers of warps and pipeline stages, which leave arguments and
grid as they are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.codegen.triton.compile import Workers
from llmc.processes.processors import usable_processors
from llmc.program import DeviceKernel, Program, StepOutput
from llmc.targets import GpuTarget
from llmc.tuning.choice import Tuned, fastest
from llmc.tuning.steps import steps_of
from llmc.tuning.timing import LAUNCHES, ROUNDS, timed

if TYPE_CHECKING:
    from llmc.runtime.device.inputs import StepShape
    from llmc.runtime.executors.cuda import CudaExecutor

_MAX_WARPS, _MAX_STAGES = 16, 5


def variants(kernel: DeviceKernel) -> tuple[DeviceKernel, ...]:
    """Other numbers of warps and stages near the kernel's own, under new names. A kernel that is written for its number
    of warps keeps it."""
    warps = {kernel.num_warps // 2, kernel.num_warps, kernel.num_warps * 2} & set(range(1, _MAX_WARPS + 1))
    if "WARPS" in kernel.constants:
        warps = {kernel.num_warps}
    stages = {kernel.num_stages + d for d in (-1, 0, 1)} & set(range(1, _MAX_STAGES + 1))
    others = sorted((w, s) for w in warps for s in stages if (w, s) != (kernel.num_warps, kernel.num_stages))
    return tuple(
        replace(kernel, name=f"{kernel.name}.w{w}s{s}", num_warps=w, num_stages=s, binaries={}) for w, s in others
    )


def compile_variants(program: Program, target: GpuTarget, scratch: Path) -> dict[str, tuple[DeviceKernel, ...]]:
    """Return for each launched kernel its variants that compile, fit and do not spill, with binaries in `scratch`.

    The number of stages changes nothing in many kernels. The machine codes of a kernel and its variants all differ.
    """
    kernels = program.launched_kernels()
    tried = [variant for kernel in kernels for variant in variants(kernel)]
    with Workers(usable_processors()) as workers:
        usable = dict(zip((v.name for v in tried), workers.compile_usable(tried, target, scratch), strict=True))
    by_kernel = {kernel.name: (usable[variant.name] for variant in variants(kernel)) for kernel in kernels}
    return {
        kernel.name: distinct(kernel, [variant for variant in by_kernel[kernel.name] if variant is not None], scratch)
        for kernel in kernels
    }


def distinct(kernel: DeviceKernel, compiled: Sequence[DeviceKernel], scratch: Path) -> tuple[DeviceKernel, ...]:
    """The first of the compiled variants with each machine code that is not the kernel's."""
    found: dict[bytes, DeviceKernel] = {}
    for variant in compiled:
        ((arch, binary),) = variant.binaries.items()
        own = kernel.binaries.get(arch)
        code = (scratch / binary.file).read_bytes()
        if own is None or code != (scratch / own.file).read_bytes():
            found.setdefault(code, variant)
    return tuple(found.values())


def choose_variants(
    executor: CudaExecutor,
    program: Program,
    compiled: Mapping[str, Sequence[DeviceKernel]],
    scratch: Path,
    tell: Callable[[str], None],
) -> tuple[dict[str, DeviceKernel], tuple[Tuned, ...]]:
    """Measure every kernel's variants in the first step that has it: a decode, a prompt, or the largest of a launch."""
    chosen: dict[str, DeviceKernel] = {}
    results = []
    steps = steps_of(program)
    for kernel in program.launched_kernels():
        others = {variant.name: variant for variant in compiled[kernel.name]}
        seconds = _measure(executor, kernel, list(others.values()), steps, scratch)
        if not seconds:
            continue
        best = fastest(seconds, kernel.name)
        winner = others.get(best, kernel)
        if best != kernel.name:
            chosen[kernel.name] = winner
        result = Tuned(
            kernel.name, kernel.name, seconds[kernel.name], seconds[best], winner.num_warps, winner.num_stages
        )
        results.append(result)
        tell(f"{result.kernel}: {result.before * 1e6:.1f} µs, {result.after * 1e6:.1f} µs tuned")
    return chosen, tuple(results)


def _measure(
    executor: CudaExecutor,
    kernel: DeviceKernel,
    others: Sequence[DeviceKernel],
    steps: Sequence[StepShape],
    scratch: Path,
) -> dict[str, float]:
    """Median seconds per launch, by name; empty for a kernel that none of the steps launches."""
    import torch

    from llmc.runtime.executors.cuda_driver import load_kernel

    launches = (
        (shape, call, grid)
        for wanted in (StepOutput.LOGITS, StepOutput.BEST)
        for shape in steps
        for call, grid in executor.launches(shape, wanted)
    )
    place = next((launch for launch in launches if launch[1].kernel.name == kernel.name), None)
    if place is None:
        return {}
    shape, call, grid = place
    executor.load_example(shape)
    loaded = {kernel.name: executor.kernel(kernel.name)}
    loaded |= {k.name: load_kernel(next(iter(k.binaries.values())), scratch) for k in others}
    stream = torch.cuda.current_stream().cuda_stream
    runs = {name: executor.bound(call, grid, shape, function) for name, function in loaded.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loaded}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            seconds[name] += timed(partial(run, stream), LAUNCHES)
    return {name: statistics.median(values) for name, values in seconds.items()}
