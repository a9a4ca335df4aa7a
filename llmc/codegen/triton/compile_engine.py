"""Compile an engine's kernels, from the sources in it, for an instruction set that it carries no binaries for.

Run as a process with one argument, a JSON object: engine, program (a file in it), arch, shared_memory (limit per block,
in bytes) and output. Output is a directory that is created atomically: program.json, whose kernels name the binaries,
the sources, and the binaries next to them.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from llmc.codegen.triton.compile import compile_program
from llmc.engine_format import engine_files
from llmc.engine_format.engine_kinds import PROGRAM_NAME
from llmc.errors import LlmcError
from llmc.files.atomic_directory import AtomicDirectory
from llmc.program.program_json import program_from_json, program_to_json
from llmc.targets import GPU_TARGETS, GpuTarget


def main() -> None:
    """Exit code 1 with the problem as the last line of standard error if it cannot be done."""
    request = json.loads(sys.argv[1])
    target = device_target_of(request["arch"], request["shared_memory"])
    try:
        compile_engine_kernels(Path(request["engine"]), request["program"], target, Path(request["output"]))
    except LlmcError as error:
        sys.exit(" ".join(error.problem.split()))


def compile_engine_kernels(engine: Path, program_name: str, target: GpuTarget, output: Path) -> None:
    """Write the kernels' sources, binaries and records; another process that does the same at once does no harm."""
    files = engine_files(engine)
    program = program_from_json(files.text(program_name), engine / program_name)
    with AtomicDirectory(output, lambda path: (path / PROGRAM_NAME).exists()) as directory:
        # A stage's folder also has the files of device functions that its kernels call.
        folders = sorted({str(Path(kernel.source).parent) for kernel in program.kernels if not kernel.is_library})
        for name in (name for folder in folders for name in files.below(folder)):
            if name.endswith(".py"):
                (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
                (directory.path / name).write_bytes(files.read(name))
        plain = tuple(replace(kernel, binaries={}) for kernel in program.kernels)
        compiled = compile_program(replace(program, kernels=plain), directory.path, target)
        (directory.path / PROGRAM_NAME).write_text(program_to_json(compiled), encoding="utf-8")
        directory.commit()


def device_target_of(arch: int, shared_memory: int) -> GpuTarget:
    """The table's target of the instruction set, or the newest one before it, with that much shared memory a block."""
    older = [t for t in GPU_TARGETS if isinstance(t.arch, int) and t.arch <= arch]
    nearest = max(older, key=lambda t: (int(t.arch), -t.bandwidth), default=GPU_TARGETS[0])
    return replace(nearest, name=f"sm_{arch}", arch=arch, shared_memory_per_block=shared_memory)


if __name__ == "__main__":
    main()
