"""`llmc tune`: measure an engine's choices on this machine's GPU and record the fastest in the engine.

First the ways to compute a node that the engine carries (llmc.program.Alternative), each in the largest step that has
it; then variants of every kernel, compiled for other numbers of warps and pipeline stages, which leave arguments and
grid as they are. Each is measured in the launches of a real step.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.codegen.triton.compile import Workers, processors
from llmc.codegen.triton.compile_engine import device_target_of
from llmc.codegen.triton.launch_alternatives import launch_alternatives, with_every_buffer
from llmc.engine_format import EngineDirectory, read_engine
from llmc.engine_format.reader import TargetProgram
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError
from llmc.program import Alternative, DeviceKernel, Launch, Limits, Program, RowCount, RowRange, StepOutput
from llmc.program.program_json import program_to_json
from llmc.targets import GpuTarget

if TYPE_CHECKING:
    from llmc.runtime.device.device import Device
    from llmc.runtime.device.inputs import StepShape
    from llmc.runtime.executors.cuda import CudaExecutor

PREFILL_TOKENS = 512
LAUNCHES, ROUNDS, WARM_UP = 20, 5, 5
# A variant has to be faster by this much: less is noise.
LEAST_GAIN = 0.03
_MAX_WARPS, _MAX_STAGES = 16, 5
# 0.2 ms of a GPU's clock: several launches are queued in that time.
_QUEUEING_CYCLES = 400_000


@dataclass(frozen=True)
class Tuned:
    """Seconds of a choice as it was, and of what was chosen (the same if nothing was). what: now launched there.

    kernel: the one that was launched there before. num_warps, num_stages: of what is now.
    """

    kernel: str
    what: str
    before: float
    after: float
    num_warps: int
    num_stages: int


def tune(path: Path, output: Path, tell: Callable[[str], None]) -> tuple[Tuned, ...]:
    """Write a tuned copy of the engine to `output`, which may be the engine itself; whole or not at all.

    tell: told a line as each choice is made. Raises LlmcError without a GPU, or for an engine that is not for one.
    """
    directory = read_engine(path)
    if not directory.program.kernels:
        raise EngineFormatError(
            f"the engine was built for {directory.manifest.target.name}, whose kernels are not tuned",
            at=path,
            fix="name an engine for a GPU: llmc build MODEL --target auto -o ENGINE",
        )
    from llmc.runtime.device.binaries import carried_archs, fitting_arch, program_for
    from llmc.runtime.device.device import open_device

    device = open_device(path)
    own = program_for(directory, device)
    arch = fitting_arch(carried_archs(own.program), device.capability)
    if arch is None:
        raise EngineFormatError(
            f"the engine has no kernels for this GPU, {device.name}, which could be tuned",
            at=path,
            fix="build it for this GPU first: llmc build MODEL --target auto -o ENGINE",
        )
    target = device_target_of(int(arch.removeprefix("sm_")), device.shared_memory)
    with tempfile.TemporaryDirectory(prefix="llmc-tune-") as folder:
        scratch = Path(folder)
        copy_kernels(directory, own.program, scratch)
        program, usable = compile_alternatives(own.program, target, scratch)
        executor = _open(directory, with_every_buffer(program), arch, device, scratch)
        winners, ways = choose_ways(program, usable, lambda x, shape: _seconds(executor, x, shape, scratch), tell)
        executor.close()
        program = launch_alternatives(program, winners)
        compiled = compile_variants(program, target, scratch)
        executor = _open(directory, program, arch, device, scratch)
        chosen, results = choose(executor, program, compiled, scratch, tell)
        executor.close()
        write_tuned(directory, replace(own, program=program), chosen, scratch, output)
    return (*ways, *results)


def _open(engine: EngineDirectory, program: Program, arch: str, device: Device, directory: Path) -> CudaExecutor:
    import torch

    from llmc.runtime.device.binaries import DeviceBinaries
    from llmc.runtime.device.memory import plan_device_memory
    from llmc.runtime.executors.cuda import CudaExecutor

    free, _ = torch.cuda.mem_get_info(device.index)
    memory = plan_device_memory(program, free, None)
    return CudaExecutor(engine, device, DeviceBinaries(program, arch, directory), memory)


def copy_kernels(engine: EngineDirectory, program: Program, scratch: Path) -> None:
    """The kernels' sources and binaries, at the same places."""
    files = {kernel.source for kernel in program.kernels if not kernel.is_library}
    files |= {binary.file for kernel in program.kernels for binary in kernel.binaries.values()}
    for file in sorted(files):
        (scratch / file).parent.mkdir(parents=True, exist_ok=True)
        (scratch / file).write_bytes(engine.files.read(file))


def compile_alternatives(program: Program, target: GpuTarget, scratch: Path) -> tuple[Program, tuple[Alternative, ...]]:
    """The program with binaries for what only alternatives launch; and the alternatives that compile without spills."""
    folder = str(Path(next(iter(program.launched_kernels()[0].binaries.values())).file).parent)
    missing = [kernel for kernel in program.kernels if not kernel.is_library and not kernel.binaries]
    with Workers(processors()) as workers:
        found = workers.compile_usable(missing, target, scratch, folder)
    ready = {kernel.name: kernel for kernel in found if kernel is not None}
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
    """The fastest alternative of each site, where one beats what is launched there. seconds: measures launches."""
    sites: dict[tuple[int, int], list[Alternative]] = {}
    for alternative in usable:
        sites.setdefault((alternative.first, alternative.last), []).append(alternative)
    winners, results = [], []
    kernels = {kernel.name: kernel for kernel in program.kernels}
    for (first, last), others in sites.items():
        own = program.launches[first : last + 1]
        shape = shape_of(own[0].only, program.limits)
        measured = {"own": seconds(own, shape)} | {str(i): seconds(a.launches, shape) for i, a in enumerate(others)}
        best = fastest(measured, "own")
        launches = own if best == "own" else others[int(best)].launches
        if best != "own":
            winners.append(others[int(best)])
        names = " + ".join(launch.kernel for launch in launches)
        kernel = kernels[launches[-1].kernel]
        before = " + ".join(launch.kernel for launch in own)
        found = Tuned(before, names, measured["own"], measured[best], kernel.num_warps, kernel.num_stages)
        results.append(found)
        tell(f"{before}: {found.before * 1e6:.1f} µs; {names}: {found.after * 1e6:.1f} µs")
    return winners, tuple(results)


def shape_of(only: RowRange | None, limits: Limits) -> StepShape:
    """The largest step with that many rows: of single tokens where so many requests fit, else of one prompt."""
    from llmc.runtime.device.inputs import StepShape

    columns = -(-limits.max_model_len // limits.block_size)
    is_logits = only is not None and only.rows is RowCount.LOGIT_ROWS
    most = limits.max_logit_rows if is_logits else min(limits.max_batch_tokens, limits.max_model_len)
    count = most if only is None or only.last is None else min(only.last, most)
    decodes = min(limits.max_sequences, limits.max_logit_rows)
    if count <= decodes:
        return StepShape(count, count, count, columns)
    return StepShape(count, count if is_logits else 1, 1, columns)


def _seconds(executor: CudaExecutor, launches: Sequence[Launch], shape: StepShape, scratch: Path) -> float:
    """Median seconds of launches, one after the other."""
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

    def run() -> None:
        for call, grid in calls:
            if call.kernel.is_library:
                executor.launch(call, grid, shape, stream)
            else:
                executor.launch_as(loaded[call.kernel.name], call, grid, shape, stream)

    return statistics.median(timed(run, LAUNCHES * ROUNDS))


def timed(run: Callable[[], None], times: int) -> list[float]:
    """Seconds of each run but the first few, which warm up.

    What it reads lies outside of the L2 cache, as the weights of a layer do when a step comes to them.
    """
    import torch

    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flushed = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + times)]
    for start, end in events:
        flushed.zero_()
        # Meanwhile the launches are queued, so that their time has no wait for the CPU in it.
        torch.cuda._sleep(_QUEUEING_CYCLES)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events[WARM_UP:]]


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


def compile_variants(program: Program, target: GpuTarget, scratch: Path) -> dict[str, tuple[DeviceKernel, ...]]:
    """By launched kernel: its variants that compile, fit and do not spill, with binaries in `scratch`."""
    kernels = program.launched_kernels()
    tried = [variant for kernel in kernels for variant in variants(kernel)]
    with Workers(processors()) as workers:
        usable = dict(zip((v.name for v in tried), workers.compile_usable(tried, target, scratch), strict=True))
    found = {kernel.name: (usable[variant.name] for variant in variants(kernel)) for kernel in kernels}
    return {name: tuple(variant for variant in each if variant is not None) for name, each in found.items()}


def choose(
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
        seconds = measure(executor, kernel, list(others.values()), steps, scratch)
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


def measure(
    executor: CudaExecutor,
    kernel: DeviceKernel,
    others: Sequence[DeviceKernel],
    steps: Sequence[StepShape],
    scratch: Path,
) -> dict[str, float]:
    """Median seconds a launch, by name; empty for a kernel that none of the steps has."""
    import torch

    from llmc.runtime.executors.cuda_driver import load_kernel

    found = (
        (shape, call, grid)
        for wanted in (StepOutput.LOGITS, StepOutput.BEST)
        for shape in steps
        for call, grid in executor.launches(shape, wanted)
    )
    place = next((each for each in found if each[1].kernel.name == kernel.name), None)
    if place is None:
        return {}
    shape, call, grid = place
    executor.load_example(shape)
    loaded = {kernel.name: executor.kernel(kernel.name)}
    loaded |= {k.name: load_kernel(next(iter(k.binaries.values())), scratch) for k in others}
    stream = torch.cuda.current_stream().cuda_stream
    seconds: dict[str, list[float]] = {name: [] for name in loaded}
    for _ in range(ROUNDS):
        for name, function in loaded.items():
            seconds[name] += timed(partial(executor.launch_as, function, call, grid, shape, stream), LAUNCHES)
    return {name: statistics.median(values) for name, values in seconds.items()}


def steps_of(program: Program) -> tuple[StepShape, ...]:
    """A single decode, a full batch of them, a prompt; then for each range of rows the largest step in it."""
    from llmc.runtime.device.inputs import StepShape

    limits = program.limits
    tokens = min(PREFILL_TOKENS, limits.max_batch_tokens, limits.max_model_len)
    columns = -(-limits.max_model_len // limits.block_size)
    batch = min(limits.max_sequences, limits.max_logit_rows, limits.max_batch_tokens)
    common = (
        StepShape(1, 1, 1, columns),
        StepShape(batch, batch, batch, columns),
        StepShape(tokens, 1, 1, columns),
    )
    ranges = dict.fromkeys(launch.only for launch in program.launches)
    return tuple(dict.fromkeys((*common, *(shape_of(only, limits) for only in ranges))))


def write_tuned(
    engine: EngineDirectory, tuned: TargetProgram, chosen: Mapping[str, DeviceKernel], scratch: Path, output: Path
) -> None:
    """The engine's files with a target's program tuned; a chosen variant's binary replaces its kernel's, name and all.

    scratch: has the binaries of variants, and of kernels that the engine carried none for.
    """
    kernels, taken = [], dict[str, Path]()
    launched = {kernel.name for kernel in tuned.program.launched_kernels()}
    for kernel in tuned.program.kernels:
        variant = chosen.get(kernel.name)
        if kernel.name not in launched:
            kernel = replace(kernel, binaries={})
        elif variant is not None:
            ((arch, binary),) = variant.binaries.items()
            file = kernel.binaries[arch].file if arch in kernel.binaries else binary.file
            taken[file] = scratch / binary.file
            binaries = {**kernel.binaries, arch: replace(binary, file=file)}
            kernel = replace(kernel, num_warps=variant.num_warps, num_stages=variant.num_stages, binaries=binaries)
        for binary in kernel.binaries.values():
            if binary.file not in engine.manifest.files:
                taken.setdefault(binary.file, scratch / binary.file)
        kernels.append(kernel)
    program = replace(tuned.program, kernels=tuple(kernels))
    carried = {b.file for k in kernels for b in k.binaries.values()}
    dropped = {
        b.file for e in engine.programs if e.file == tuned.file for k in e.program.kernels for b in k.binaries.values()
    }
    with EngineWriter(output) as writer:
        for name in engine.manifest.files:
            if name == tuned.file:
                writer.write_text(name, program_to_json(program))
            elif name not in taken and name not in dropped - carried:
                writer.copy_file(name, engine.path / name)
        for name, source in sorted(taken.items()):
            writer.copy_file(name, source)
        writer.finish(replace(engine.manifest, files={}))
