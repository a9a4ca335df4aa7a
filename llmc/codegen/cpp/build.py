"""Compile an engine's generated C++ and link it with the cached kernels into one shared library.

The same source, compiler and kernels give the same bytes, which are kept in the cache: no paths, times or build numbers
go into the file. Only the engine's own interface is visible from outside.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from llmc.cache import CacheKind, open_cache
from llmc.codegen.cpp.hashed_files import hashed_entry
from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import LINK_FLAGS, Part, compile_flags, kernel_archive, part_of
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
_HIDING = ("-Wl,--build-id=none", "-Wl,--no-undefined", "-Wl,--strip-all")
_LIBRARY = "engine.so"
_EXPORTS = "{ global: llmc_engine_*; local: *; };\n"


def library_name(content: bytes) -> str:
    """The file name of an engine's library, derived from its content, so that a process with an older one open loads
    the new one."""
    return f"kernels/engine-{hashlib.sha256(content).hexdigest()[:16]}.so"


def compile_source(lowered: Lowered, source: Path, target: CpuTarget) -> bytes:
    """The library made of a program's source, which is in the file `source`.

    The same source was perhaps compiled before, for a model of the same shapes with other weights: then it is in the
    cache. Raises ToolchainError when there is no compiler, or when it does not accept the code.
    """
    is_coded = any(part_of(launch.family, launch.dtypes) is Part.CODED for launch in lowered.program.launches)
    parts = (Part.CODED, Part.PLAIN) if is_coded else (Part.PLAIN,)
    archives = [kernel_archive(target, part=part) for part in parts]

    # An archive's folder is named after its target, its sources and headers, the compiler and the flags.
    made_from = [source.read_text(encoding="utf-8"), [archive.parent.name for archive in archives], _FLAGS, _HIDING]
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]
    compile = partial(_compile, source, target, archives)
    return (hashed_entry(open_cache(CacheKind.PROGRAMS), key, (_LIBRARY,), compile) / _LIBRARY).read_bytes()


def _compile(source: Path, target: CpuTarget, archives: list[Path], build: Path) -> None:
    toolchain = find_toolchain()
    compiled, exports = build / "engine.o", build / "exports.map"
    exports.write_text(_EXPORTS, encoding="ascii")
    headers = kernel_include_dir()
    maps = (f"-ffile-prefix-map={source.parent}=.", f"-ffile-prefix-map={headers}=.")
    flags = (*compile_flags(target), *_FLAGS, *maps, f"-I{headers}")
    compiling: list[str | Path] = [*flags, "-c", source, "-o", compiled]
    run_tool([*toolchain.compiler, *compiling], source=source, scratch=build)
    script = f"-Wl,--version-script={exports}"
    linking: list[str | Path] = [*LINK_FLAGS, script, *_HIDING, compiled, *archives, "-o", build / _LIBRARY]
    run_tool([*toolchain.compiler, *linking], source=source, scratch=build)
