"""`llmc tune`: measure variants of an engine's kernels on this machine's GPU and record the fastest in the engine.

A variant is a kernel compiled for another number of warps or of pipeline stages: both leave its arguments and its grid
as they are, so that any kernel of any engine has some. Each is measured in the launch of a real step.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.compile_engine import device_target_of
from llmc.engine_format import EngineDirectory, EngineWriter, read_engine
from llmc.engine_format.reader import PROGRAM_NAME
from llmc.errors import EngineFormatError, LoweringError
from llmc.program import DeviceKernel
from llmc.program_json import program_to_json
from llmc.targets import GpuTarget

if TYPE_CHECKING:
    from llmc.runtime.device_inputs import StepShape
    from llmc.runtime.executors.cuda import CudaExecutor

PREFILL_TOKENS = 512
LAUNCHES, ROUNDS = 20, 5
# A variant has to be faster by this much: less is noise.
LEAST_GAIN = 0.03
_MAX_WARPS, _MAX_STAGES = 16, 5


@dataclass(frozen=True)
class Tuned:
    """A kernel's seconds a launch as it was, and those of the variant that was chosen (the same if none was)."""

    kernel: str
    before: float
    after: float
    num_warps: int
    num_stages: int


def tune(path: Path, output: Path, tell: Callable[[str], None]) -> tuple[Tuned, ...]:
    """Write a tuned copy of the engine to `output`, which may be the engine itself; whole or not at all.

    tell: told a line as each kernel is done. Raises LlmcError without a GPU, or for an engine that is not for one.
    """
    directory = read_engine(path)
    if not directory.program.kernels:
        raise EngineFormatError(
            f"the engine was built for {directory.manifest.target.name}, whose kernels are not tuned",
            at=path,
            fix="name an engine for a GPU: llmc build MODEL --target auto -o ENGINE",
        )
    from llmc.runtime.device import open_device
    from llmc.runtime.device_binaries import carried_archs, fitting_arch
    from llmc.runtime.executors.cuda import open_cuda

    device = open_device(path)
    arch = fitting_arch(carried_archs(directory.program.kernels), device.capability)
    if arch is None:
        raise EngineFormatError(
            f"the engine has no kernels for this GPU, {device.name}, which could be tuned",
            at=path,
            fix="build it for this GPU first: llmc build MODEL --target auto -o ENGINE",
        )
    executor = open_cuda(directory, None)
    target = device_target_of(int(arch.removeprefix("sm_")), device.shared_memory)
    with tempfile.TemporaryDirectory(prefix="llmc-tune-") as scratch:
        compiled = compile_variants(directory, target, Path(scratch))
        chosen, results = choose(executor, directory.program.kernels, compiled, Path(scratch), tell)
        executor.close()
        write_tuned(directory, chosen, Path(scratch), output)
    return results


def variants(kernel: DeviceKernel) -> tuple[DeviceKernel, ...]:
    """Other numbers of warps and stages near the kernel's own, under names of their own."""
    warps = {kernel.num_warps // 2, kernel.num_warps, kernel.num_warps * 2} & set(range(1, _MAX_WARPS + 1))
    stages = {kernel.num_stages + d for d in (-1, 0, 1)} & set(range(1, _MAX_STAGES + 1))
    others = sorted((w, s) for w in warps for s in stages if (w, s) != (kernel.num_warps, kernel.num_stages))
    return tuple(
        replace(kernel, name=f"{kernel.name}.w{w}s{s}", num_warps=w, num_stages=s, binaries={}) for w, s in others
    )


def fastest(seconds: Mapping[str, float], own: str) -> str:
    """The name with the least time, or `own` if none is faster by LEAST_GAIN."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < seconds[own] * (1 - LEAST_GAIN) else own


def compile_variants(engine: EngineDirectory, target: GpuTarget, scratch: Path) -> dict[str, tuple[DeviceKernel, ...]]:
    """By kernel: its variants that compile, fit and do not spill, with binaries in `scratch`."""
    for source in {kernel.source for kernel in engine.program.kernels}:
        (scratch / source).parent.mkdir(parents=True, exist_ok=True)
        (scratch / source).write_bytes((engine.path / source).read_bytes())
    found: dict[str, tuple[DeviceKernel, ...]] = {}
    with Workers(4) as workers:
        for kernel in engine.program.kernels:
            good = []
            for variant in variants(kernel):
                try:
                    binary = workers.compile(variant, target, scratch).binary
                except LoweringError:
                    continue
                if not binary.spill_bytes:
                    good.append(replace(variant, binaries={target.arch_name: binary}))
            found[kernel.name] = tuple(good)
    return found


def choose(
    executor: CudaExecutor,
    kernels: Sequence[DeviceKernel],
    compiled: Mapping[str, Sequence[DeviceKernel]],
    scratch: Path,
    tell: Callable[[str], None],
) -> tuple[dict[str, DeviceKernel], tuple[Tuned, ...]]:
    """Measure every kernel's variants in the first step that has it: a decode, or else a prompt."""
    chosen: dict[str, DeviceKernel] = {}
    results = []
    for kernel in kernels:
        others = {variant.name: variant for variant in compiled[kernel.name]}
        seconds = measure(executor, kernel, list(others.values()), scratch)
        if not seconds:
            continue
        best = fastest(seconds, kernel.name)
        winner = others.get(best, kernel)
        if best != kernel.name:
            chosen[kernel.name] = winner
        result = Tuned(kernel.name, seconds[kernel.name], seconds[best], winner.num_warps, winner.num_stages)
        results.append(result)
        tell(f"{result.kernel}: {result.before * 1e6:.1f} µs, {result.after * 1e6:.1f} µs tuned")
    return chosen, tuple(results)


def measure(
    executor: CudaExecutor, kernel: DeviceKernel, others: Sequence[DeviceKernel], scratch: Path
) -> dict[str, float]:
    """Median seconds a launch, by name; empty for a kernel that no measured step has."""
    import torch

    from llmc.runtime.executors.cuda_driver import load_kernel

    shape, call, grid = next(
        ((s, c, g) for s in _steps(executor) for c, g in executor.launches(s) if c.kernel.name == kernel.name),
        (None, None, None),
    )
    if shape is None or call is None or grid is None:
        return {}
    executor.load_example(shape)
    loaded = {kernel.name: executor.kernel(kernel.name)}
    loaded |= {k.name: load_kernel(next(iter(k.binaries.values())), scratch) for k in others}
    seconds: dict[str, list[float]] = {name: [] for name in loaded}
    stream = torch.cuda.current_stream()
    for round_number in range(ROUNDS + 1):
        for name, function in loaded.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(LAUNCHES):
                executor.launch_as(function, call, grid, shape, stream.cuda_stream)
            end.record()
            end.synchronize()
            if round_number:
                seconds[name].append(start.elapsed_time(end) / 1e3 / LAUNCHES)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _steps(executor: CudaExecutor) -> tuple[StepShape, ...]:
    from llmc.runtime.device_inputs import StepShape

    limits = executor.limits
    tokens = min(PREFILL_TOKENS, limits.max_batch_tokens, limits.max_model_len)
    columns = -(-limits.max_model_len // limits.block_size)
    batch = min(limits.max_sequences, limits.max_logit_rows, limits.max_batch_tokens)
    return (
        StepShape(1, 1, 1, columns),
        StepShape(batch, batch, batch, columns),
        StepShape(tokens, 1, 1, columns),
    )


def write_tuned(engine: EngineDirectory, chosen: Mapping[str, DeviceKernel], scratch: Path, output: Path) -> None:
    """The engine's files with the chosen variants' binaries in place of their kernels'; the names stay."""
    kernels, replaced = [], dict[str, Path]()
    for kernel in engine.program.kernels:
        variant = chosen.get(kernel.name)
        if variant is not None:
            ((arch, binary),) = variant.binaries.items()
            file = kernel.binaries[arch].file if arch in kernel.binaries else binary.file
            replaced[file] = scratch / binary.file
            binaries = {**kernel.binaries, arch: replace(binary, file=file)}
            kernel = replace(kernel, num_warps=variant.num_warps, num_stages=variant.num_stages, binaries=binaries)
        kernels.append(kernel)
    program = replace(engine.program, kernels=tuple(kernels))
    with EngineWriter(output) as writer:
        for name in engine.manifest.files:
            if name == PROGRAM_NAME:
                writer.write_text(name, program_to_json(program))
            elif name not in replaced:
                writer.copy_file(name, engine.path / name)
        for name, source in sorted(replaced.items()):
            writer.copy_file(name, source)
        writer.finish(replace(engine.manifest, files={}))
