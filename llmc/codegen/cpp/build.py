"""Compile an engine's generated C++ and link it with the cached kernels into one shared library.

The same source, compiler and kernels give the same bytes: no paths, times or build numbers go into the file. Only the
engine's own interface is visible from outside.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import (
    Part,
    compile_flags,
    kernel_archive,
    link_flags,
    part_of,
)
from llmc.codegen.cpp.lowering import Lowered
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.targets import CpuTarget

# Fields of argument structs are named, which compilers accept before C++20; its headers take 0.15 s longer to parse.
# Stores to rows that a loop reads at the same place only are what `omp simd` promises; it needs no OpenMP library.
_FLAGS = (
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-Wno-missing-field-initializers",
    "-Wno-c++20-designator",
)
SOURCE_NAME = "kernels/engine.cpp"
_EXPORTS = "{ global: llmc_engine_*; local: *; };\n"


def compile_engine(lowered: Lowered, target: CpuTarget, directory: Path) -> Path:
    """Write kernels/engine.cpp and kernels/engine-HASH.so under `directory`; returns the path of the library.

    Raises ToolchainError when there is no compiler, or when it does not accept the code.
    """
    source = directory / SOURCE_NAME
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(lowered.source, encoding="utf-8")
    content = compile_source(lowered, source, target)
    library = directory / library_name(content)
    library.write_bytes(content)
    return library


def library_name(content: bytes) -> str:
    """Of a library in an engine: of what is in it, so that a process that has an older one open gets the new one."""
    return f"kernels/engine-{hashlib.sha256(content).hexdigest()[:16]}.so"


def compile_source(lowered: Lowered, source: Path, target: CpuTarget) -> bytes:
    """The library made of a program's source, which is in the file `source`; raises as `compile_engine`."""
    is_coded = any(part_of(launch.family, launch.dtypes) is Part.CODED for launch in lowered.program.launches)
    parts = (Part.CODED, Part.PLAIN) if is_coded else (Part.PLAIN,)
    archives, toolchain = [kernel_archive(target, part=part) for part in parts], find_toolchain()
    with tempfile.TemporaryDirectory(prefix="llmc-") as temporary:
        compiled, exports = Path(temporary) / "engine.o", Path(temporary) / "exports.map"
        exports.write_text(_EXPORTS, encoding="ascii")
        headers = kernel_include_dir()
        maps = (f"-ffile-prefix-map={source.parent}=.", f"-ffile-prefix-map={headers}=.")
        flags = (*compile_flags(target), *_FLAGS, *maps, f"-I{headers}")
        compiling: list[str | Path] = [*flags, "-c", source, "-o", compiled]
        run_tool([*toolchain.compiler, *compiling], source=source)
        hiding = [f"-Wl,--version-script={exports}", "-Wl,--build-id=none", "-Wl,--no-undefined", "-Wl,--strip-all"]
        linked = Path(temporary) / "engine.so"
        linking: list[str | Path] = [*link_flags(), *hiding, compiled, *archives, "-o", linked]
        run_tool([*toolchain.compiler, *linking], source=source)
        return linked.read_bytes()
