"""Compile an engine's generated C++ and link it with the cached kernels into one shared library.

The same source, compiler and kernels give the same bytes, which are kept in the cache: no paths, times or build numbers
go into the file. Only the engine's own interface is visible from outside.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from llmc.cache import CacheKind, open_cache
from llmc.codegen.cpp.hashed_files import has_hashes, write_hashes
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
from llmc.files.atomic_directory import AtomicDirectory
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
    """The library made of a program's source, which is in the file `source`; raises as `compile_engine`.

    The same source was perhaps compiled before, for a model of the same shapes with other weights: then it is in the
    cache.
    """
    is_coded = any(part_of(launch.family, launch.dtypes) is Part.CODED for launch in lowered.program.launches)
    parts = (Part.CODED, Part.PLAIN) if is_coded else (Part.PLAIN,)
    archives = [kernel_archive(target, part=part) for part in parts]

    def make(entry: Path) -> None:
        with AtomicDirectory(entry, lambda broken: True) as directory:
            _compile(source, target, archives, directory.path / _LIBRARY)
            write_hashes(directory.path, (_LIBRARY,))
            directory.commit()

    # An archive's folder is named after its target, its sources and headers, the compiler and the flags.
    made_from = [source.read_text(encoding="utf-8"), [archive.parent.name for archive in archives], _FLAGS, _HIDING]
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]
    cache = open_cache(CacheKind.PROGRAMS)
    entry = cache.find_or_make(key, lambda entry: has_hashes(entry, (_LIBRARY,)), make)
    return (entry / _LIBRARY).read_bytes()


def _compile(source: Path, target: CpuTarget, archives: list[Path], library: Path) -> None:
    toolchain = find_toolchain()
    with tempfile.TemporaryDirectory(prefix="llmc-") as temporary:
        compiled, exports = Path(temporary) / "engine.o", Path(temporary) / "exports.map"
        exports.write_text(_EXPORTS, encoding="ascii")
        headers = kernel_include_dir()
        maps = (f"-ffile-prefix-map={source.parent}=.", f"-ffile-prefix-map={headers}=.")
        flags = (*compile_flags(target), *_FLAGS, *maps, f"-I{headers}")
        compiling: list[str | Path] = [*flags, "-c", source, "-o", compiled]
        run_tool([*toolchain.compiler, *compiling], source=source)
        script = f"-Wl,--version-script={exports}"
        linking: list[str | Path] = [*link_flags(), script, *_HIDING, compiled, *archives, "-o", library]
        run_tool([*toolchain.compiler, *linking], source=source)
