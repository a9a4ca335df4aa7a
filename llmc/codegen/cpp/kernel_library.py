"""Compile the hand-written kernels once per instruction set, compiler and source text, into a shared cache.

They are in two parts, so that the first build for a machine compiles only what its engine calls. An entry's files are
checked by their hashes whenever it is used. Builders take turns, for each keeps all processors busy, and the next one
mostly finds what it needs.
"""

import ctypes
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path

from llmc.cache import CacheKind, open_cache
from llmc.codegen.cpp.hashed_files import hashed_entry
from llmc.codegen.cpp.kernel_api import kernel_include_dir, layout_source, open_kernels
from llmc.codegen.cpp.toolchain import Toolchain, find_toolchain, run_tool
from llmc.options import BuildOptions
from llmc.processes.processors import usable_processors
from llmc.program import ITEMSIZES
from llmc.targets import CpuTarget

# Hidden: two instruction sets' libraries in one process must not share the inline functions that both define.
# -fno-math-errno and -fno-trapping-math let loops vectorize and change no result; nothing re-associates sums.
_COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
_SHARED_FLAGS = ("-shared", "-pthread", "-Wl,-z,now")
# Flags of a shared library that kernels are linked into.
LINK_FLAGS = (*_SHARED_FLAGS, "-Wl,--exclude-libs,ALL")
PAGED_ATTENTION, RAGGED_ATTENTION = "paged_attention", "ragged_attention"
_ARCHIVE, _SHARED = "libllmc_kernels.a", "libllmc_kernels.so"


class Part(Enum):
    """PLAIN: what every engine needs. CODED: products over quantized weights and attention over coded caches, whose
    many formats take several times as long to compile."""

    PLAIN = "plain"
    CODED = "coded"


def function_name(family: str, dtypes: Sequence[str]) -> str:
    """The function for these element types."""
    return "_".join(("llmc", family, *(dtype.lower() for dtype in dtypes)))


def part_of(family: str, dtypes: Sequence[str]) -> Part:
    """The part that has that function."""
    is_coded_attention = family == PAGED_ATTENTION and dtypes[1] not in ITEMSIZES
    return Part.CODED if is_coded_attention or family.startswith("quantized_") else Part.PLAIN


def kernel_archive(target: CpuTarget, cache_dir: Path | None = None, part: Part = Part.PLAIN) -> Path:
    """A part as a static library to link an engine with; CODED comes before PLAIN, which it calls.

    cache_dir: settings().cache_dir unless given. Raises ToolchainError when there is no compiler or the kernels do not
    compile.
    """
    return _entry(target, cache_dir, part) / _ARCHIVE


def load_kernels(target: CpuTarget, cache_dir: Path | None = None, part: Part = Part.PLAIN) -> ctypes.CDLL:
    """A part as a shared library, opened: probes, tests and benchmarks call kernels one by one. CODED has PLAIN's too.
    Raises also what open_kernels does."""
    return open_kernels(_entry(target, cache_dir, part) / _SHARED)


def compile_flags(target: CpuTarget) -> tuple[str, ...]:
    """Return the compiler flags of kernels. Generated code shares their inline functions, so it needs the same
    flags."""
    return (*_COMMON_FLAGS, *target.compiler_flags)


def parts_of(options: BuildOptions) -> tuple[Part, ...]:
    """The parts that engines with these options are linked with, as far as options tell."""
    is_coded = bool(options.quantize) or options.kv_cache != "auto"
    return (Part.PLAIN, Part.CODED) if is_coded else (Part.PLAIN,)


def _entry(target: CpuTarget, cache_dir: Path | None, part: Part) -> Path:
    toolchain = find_toolchain()
    # Before our turn: it takes its own turn.
    beside = () if part is Part.PLAIN else (kernel_archive(target, cache_dir),)
    compile = partial(_compile, target, toolchain, _sources(part), beside)
    name = entry_name(target, toolchain, part)
    return hashed_entry(open_cache(CacheKind.KERNELS, cache_dir), name, (_ARCHIVE, _SHARED), compile, turn="compile")


def entry_name(target: CpuTarget, toolchain: Toolchain, part: Part) -> str:
    """The name of a part's entry in the cache."""
    return f"{target.name}-{part.value}-{_key(target, toolchain)}"


def _key(target: CpuTarget, toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    recipe = [toolchain.compiler, toolchain.version, compile_flags(target), LINK_FLAGS]
    digest.update(json.dumps(recipe).encode() + layout_source().encode())
    for source in sorted(kernel_include_dir().iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _sources(part: Part) -> list[Path]:
    sources = sorted(kernel_include_dir().glob("*.cpp"))
    coded = {source for source in sources if source.stem.startswith("quantized_") or source.stem.endswith("_codes")}
    return [source for source in sources if (source in coded) is (part is Part.CODED)]


def _compile(
    target: CpuTarget, toolchain: Toolchain, sources: list[Path], beside: tuple[Path, ...], build: Path
) -> None:
    """Compile both libraries of these sources. beside: archives that are also linked whole into the shared one."""
    if not beside:
        layouts = build / "layouts.cpp"
        layouts.write_text(layout_source(), encoding="utf-8")
        sources = [*sources, layouts]
    objects = [build / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        run_tool(
            [*toolchain.compiler, *compile_flags(target), "-I", kernel_include_dir(), "-c", source, "-o", to],
            source=source,
            scratch=build,
        )

    with ThreadPoolExecutor(max_workers=usable_processors()) as workers:
        for done in [workers.submit(compile_one, *pair) for pair in zip(sources, objects, strict=True)]:
            done.result()
    run_tool([toolchain.archiver, "rcsD", build / _ARCHIVE, *objects], source=kernel_include_dir(), scratch=build)
    shared: list[str | Path] = [
        *toolchain.compiler,
        *_SHARED_FLAGS,
        *objects,
        "-Wl,--whole-archive",
        *beside,
        "-Wl,--no-whole-archive",
        "-Wl,--no-undefined",
        "-o",
        build / _SHARED,
    ]
    run_tool(shared, source=kernel_include_dir(), scratch=build)
