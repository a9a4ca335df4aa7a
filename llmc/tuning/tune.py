"""`llmc tune`: measure an engine's choices on this machine's GPU and record the fastest in the engine.

First the ways to compute a node that the engine carries (ways.py), then variants of every kernel (variants.py). Each is
measured in the launches of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.codegen.triton.compile_engine import device_target_of
from llmc.codegen.triton.launch_alternatives import launch_alternatives, with_every_buffer
from llmc.engine_format import EngineDirectory, read_engine
from llmc.engine_format.reader import TargetProgram
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.program import DeviceKernel, Program
from llmc.program.program_json import program_to_json
from llmc.tuning.choice import Tuned
from llmc.tuning.variants import choose_variants, compile_variants
from llmc.tuning.ways import choose_ways, compile_alternatives, seconds_of

if TYPE_CHECKING:
    from llmc.runtime.device.device import Device
    from llmc.runtime.executors.cuda import CudaExecutor


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
    if directory.program.layout.pipeline > 1:
        raise EngineFormatError(
            f"the engine has {directory.program.layout.pipeline} pipeline stages, and tuning measures whole steps",
            at=path,
            fix="tune an engine of the same model with pipeline_parallel_size=1; the choices of this one are predicted",
        )
    from llmc.runtime.device.binaries import carried_archs, fitting_arch, program_for
    from llmc.runtime.device.device import open_device

    device = open_device(path)
    own = program_for(directory.programs, device)
    arch = fitting_arch(carried_archs(own.program), device.capability)
    if arch is None:
        raise EngineFormatError(
            f"the engine has no kernels for this GPU, {device.name}, which could be tuned",
            at=path,
            fix="build it for this GPU first: llmc build MODEL --target auto -o ENGINE",
        )
    target = device_target_of(int(arch.removeprefix("sm_")), device.shared_memory)
    with ScratchDirectory() as scratch:
        _copy_kernels(directory, own.program, scratch)
        program, usable = compile_alternatives(own.program, target, scratch)
        executor = _open(directory, with_every_buffer(program), arch, device, scratch)
        winners, ways = choose_ways(program, usable, lambda x, shape: seconds_of(executor, x, shape, scratch), tell)
        executor.close()
        program = launch_alternatives(program, winners)
        compiled = compile_variants(program, target, scratch)
        executor = _open(directory, program, arch, device, scratch)
        chosen, results = choose_variants(executor, program, compiled, scratch, tell)
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


def _copy_kernels(engine: EngineDirectory, program: Program, scratch: Path) -> None:
    """The kernels' sources and binaries, at the same places."""
    files = {kernel.source for kernel in program.kernels if not kernel.is_library}
    files |= {name for kernel in program.kernels for binary in kernel.binaries.values() for name in binary.files}
    for file in sorted(files):
        (scratch / file).parent.mkdir(parents=True, exist_ok=True)
        (scratch / file).write_bytes(engine.files.read(file))


def write_tuned(
    engine: EngineDirectory, tuned: TargetProgram, chosen: Mapping[str, DeviceKernel], scratch: Path, output: Path
) -> None:
    """The engine's files with a target's program tuned. A chosen variant's binary and PTX replace its kernel's, under
    the kernel's names.

    scratch: has the binaries of variants, and of kernels that the engine carried none for.
    """
    kernels, files = [], dict[str, Path]()
    launched = {kernel.name for kernel in tuned.program.launched_kernels()}
    for kernel in tuned.program.kernels:
        variant = chosen.get(kernel.name)
        if kernel.name not in launched:
            kernel = replace(kernel, binaries={})
        elif variant is not None:
            ((arch, binary),) = variant.binaries.items()
            own = kernel.binaries.get(arch, binary)
            placed = replace(binary, file=own.file, assembly=binary.assembly and (own.assembly or binary.assembly))
            files |= {file: scratch / other for file, other in zip(placed.files, binary.files, strict=True)}
            binaries = {**kernel.binaries, arch: placed}
            kernel = replace(kernel, num_warps=variant.num_warps, num_stages=variant.num_stages, binaries=binaries)
        for name in (name for binary in kernel.binaries.values() for name in binary.files):
            if name not in engine.manifest.files:
                files.setdefault(name, scratch / name)
        kernels.append(kernel)
    program = replace(tuned.program, kernels=tuple(kernels))
    carried = _binary_files(kernels)
    dropped = {name for e in engine.programs if e.file == tuned.file for name in _binary_files(e.program.kernels)}
    with EngineWriter(output) as writer:
        for name in engine.manifest.files:
            if name == tuned.file:
                writer.write_text(name, program_to_json(program))
            elif name not in files and name not in dropped - carried:
                writer.copy_file(name, engine.path / name)
        for name, source in sorted(files.items()):
            writer.copy_file(name, source)
        writer.finish(replace(engine.manifest, files={}))


def _binary_files(kernels: Sequence[DeviceKernel]) -> set[str]:
    return {name for kernel in kernels for binary in kernel.binaries.values() for name in binary.files}
