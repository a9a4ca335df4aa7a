"""Which of an engine's compiled kernels a device can run; if none, all of them compiled once from the sources in it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.errors import TargetError
from llmc.program import DeviceKernel
from llmc.program_json import program_from_json
from llmc.settings import settings

COMPILER = "llmc.codegen.triton.compile_engine"
COMPILED_PROGRAM = "program.json"


@dataclass(frozen=True)
class DeviceBinaries:
    """Kernels that each have a binary for `arch`, in files relative to `directory`."""

    kernels: tuple[DeviceKernel, ...]
    arch: str
    directory: Path


def binaries_for(
    engine: EngineDirectory, capability: tuple[int, int], shared_memory: int, tell: Callable[[str], None]
) -> DeviceBinaries:
    """The engine's own binaries, or ones compiled for this device and kept in the cache directory.

    capability: the device's. shared_memory: bytes that a block may have. tell: told a line before compiling. Raises
    TargetError if they cannot be compiled here.
    """
    kernels = engine.program.kernels
    arch = fitting_arch(carried_archs(kernels), capability)
    if arch is not None:
        return DeviceBinaries(kernels, arch, engine.path)
    arch = f"sm_{capability[0]}{capability[1]}"
    directory = settings().cache_dir / "engines" / cache_key(engine, arch)
    if not (directory / COMPILED_PROGRAM).exists():
        carried = ", ".join(sorted(carried_archs(kernels))) or "none"
        tell(f"the engine carries kernels for {carried}; compiling its {len(kernels)} kernels for {arch}, once")
        _compile(engine.path, capability, shared_memory, directory)
    path = directory / COMPILED_PROGRAM
    return DeviceBinaries(program_from_json(path.read_text(encoding="utf-8"), path).kernels, arch, directory)


def carried_archs(kernels: Collection[DeviceKernel]) -> frozenset[str]:
    """The instruction sets that every kernel has a binary for."""
    each = [frozenset(kernel.binaries) for kernel in kernels]
    return frozenset.intersection(*each) if each else frozenset()


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


def cache_key(engine: EngineDirectory, arch: str) -> str:
    """A name for the kernels' sources and specializations, compiled by this Triton for that instruction set."""
    digest = hashlib.sha256(f"{arch} {triton_version()}".encode())
    for kernel in engine.program.kernels:
        digest.update(repr(replace(kernel, binaries={})).encode())
    for source in sorted({kernel.source for kernel in engine.program.kernels}):
        digest.update((engine.path / source).read_bytes())
    return f"{arch}-{digest.hexdigest()[:32]}"


def triton_version() -> str:
    """The installed Triton's version; `none` without one."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def _compile(engine: Path, capability: tuple[int, int], shared_memory: int, directory: Path) -> None:
    """In a process of its own, because the runtime knows nothing of code generation."""
    fix = f"rebuild it for this GPU where the model is: llmc build MODEL --target auto -o {engine.name}"
    if triton_version() == "none":
        raise TargetError(
            f"the engine has no kernels for sm_{capability[0]}{capability[1]}, and triton, which could compile them, "
            "is not installed",
            at=engine,
            fix=f"pip install triton, or {fix}",
        )
    request = {
        "engine": str(engine.resolve()),
        "arch": capability[0] * 10 + capability[1],
        "shared_memory": shared_memory,
        "output": str(directory),
    }
    done = subprocess.run([sys.executable, "-m", COMPILER, json.dumps(request)], capture_output=True, text=True)
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise TargetError(
            f"the engine's kernels cannot be compiled for sm_{capability[0]}{capability[1]}: {last.strip()}",
            at=engine,
            fix=fix,
        )
