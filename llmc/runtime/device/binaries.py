"""Choose the binaries of an engine that a device can run; if there are none, compile them from the engine's sources."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmc.cache import CacheKind, open_cache
from llmc.cache.installed_version import installed_version
from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import TargetProgram
from llmc.errors import TargetError
from llmc.processes.worker_command import worker_command, worker_environment
from llmc.program import Program
from llmc.program.program_json import program_from_json
from llmc.runtime.device.device import Device
from llmc.targets import match_device

COMPILER = "llmc.codegen.triton.compile_engine"
COMPILED_PROGRAM = "program.json"


@dataclass(frozen=True)
class DeviceBinaries:
    """A program whose launched kernels each have a binary for `arch`, in files relative to `directory`."""

    program: Program
    arch: str
    directory: Path


def binaries_for(engine: EngineDirectory, device: Device, tell: Callable[[str], None]) -> DeviceBinaries:
    """The engine's own binaries that fit the device best, or ones compiled for it and kept in the cache directory.

    tell: told a line before compiling. Raises TargetError if they cannot be compiled here.
    """
    chosen = program_for(engine.programs, device)
    carried = carried_archs(chosen.program)
    arch = fitting_arch(carried, device.capability)
    if arch is not None:
        return DeviceBinaries(chosen.program, arch, engine.path)
    arch = f"sm_{device.capability[0]}{device.capability[1]}"

    def make(directory: Path) -> None:
        archs = ", ".join(sorted({a for program in engine.programs for a in carried_archs(program.program)})) or "none"
        count = len(chosen.program.launched_kernels())
        tell(f"the engine carries kernels for {archs}; compiling its {count} kernels for {arch}, once")
        _compile(engine.path, chosen.file, device, directory)

    name = cache_key(engine, chosen.program, arch)
    directory = open_cache(CacheKind.DEVICE_KERNELS).find_or_make(name, _has_program, make)
    path = directory / COMPILED_PROGRAM
    return DeviceBinaries(program_from_json(path.read_text(encoding="utf-8"), path), arch, directory)


def _has_program(directory: Path) -> bool:
    return (directory / COMPILED_PROGRAM).exists()


def program_for(programs: Sequence[TargetProgram], device: Device) -> TargetProgram:
    """The program of an engine or a stage that was made for this very GPU; or one whose binaries it runs, the newest;
    or the newest that it could."""
    named = match_device(device.name, device.capability, is_hip=False)
    major, minor = device.capability

    def suitability(program: TargetProgram) -> tuple[bool, bool, bool, str]:
        arch = fitting_arch(carried_archs(program.program), device.capability)
        newest = max(carried_archs(program.program), default="")
        is_older = newest.removeprefix("sm_").isdigit() and int(newest.removeprefix("sm_")) <= 10 * major + minor
        return (
            arch is not None and named is not None and program.target == named.name,
            arch is not None,
            is_older,
            newest,
        )

    return max(programs, key=suitability)


def carried_archs(program: Program) -> frozenset[str]:
    """The instruction sets that every launched kernel has a binary for."""
    archs = [frozenset(kernel.binaries) for kernel in program.launched_kernels()]
    return frozenset.intersection(*archs) if archs else frozenset()


def fitting_arch(available: Collection[str], capability: tuple[int, int]) -> str | None:
    """The best instruction set of those available that a CUDA device runs, or None.

    Machine code for 8.0 runs on 8.6 and 8.9 too. From 9.0 on Triton compiles for sm_90a, sm_100a and so on, which
    run on exactly that device.
    """
    major, minor = capability
    exact = f"sm_{major}{minor}"
    if exact in available:
        return exact
    if major != 8:
        return None
    older = [arch for arch in (f"sm_8{m}" for m in range(minor - 1, -1, -1)) if arch in available]
    return older[0] if older else None


def cache_key(engine: EngineDirectory, program: Program, arch: str) -> str:
    """A name for the program with its kernels' sources, compiled by this Triton for that instruction set."""
    digest = hashlib.sha256(f"{arch} {installed_version('triton')}".encode())
    plain = tuple(replace(kernel, binaries={}) for kernel in program.kernels)
    digest.update(repr(replace(program, kernels=plain)).encode())
    for source in sorted({kernel.source for kernel in program.kernels if not kernel.is_library}):
        digest.update(engine.files.read(source))
    return f"{arch}-{digest.hexdigest()[:32]}"


def _compile(engine: Path, program: str, device: Device, directory: Path) -> None:
    """Compile in a separate process, because the runtime does not import code generation."""
    capability = device.capability
    fix = f"rebuild it for this GPU where the model is: llmc build MODEL --target auto -o {engine.name}"
    if installed_version("triton") is None:
        raise TargetError(
            f"the engine has no kernels for sm_{capability[0]}{capability[1]}, and triton, which could compile them, "
            "is not installed",
            at=engine,
            fix=f"pip install triton, or {fix}",
        )
    request = {
        "engine": str(engine.resolve()),
        "program": program,
        "arch": capability[0] * 10 + capability[1],
        "shared_memory": device.shared_memory,
        "output": str(directory),
    }
    command = worker_command(COMPILER, json.dumps(request))
    done = subprocess.run(command, capture_output=True, text=True, env=worker_environment())
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise TargetError(
            f"the engine's kernels cannot be compiled for sm_{capability[0]}{capability[1]}: {last.strip()}",
            at=engine,
            fix=fix,
        )
