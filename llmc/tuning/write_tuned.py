"""An engine with what was chosen in it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import TargetProgram
from llmc.engine_format.writer import EngineWriter
from llmc.program import DeviceKernel
from llmc.program.program_json import program_to_json


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
