"""Whether this machine can compile for a target at all, found out in a fraction of a second and not after minutes."""

import functools
from collections.abc import Sequence

from llmc.cache import CacheKind, open_cache
from llmc.codegen.cpp.kernel_library import LINK_FLAGS, Part, compile_flags, entry_name
from llmc.codegen.cpp.toolchain import Toolchain, find_toolchain, run_tool
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.storage_error import ELSEWHERE_CACHED, full_disk_told, require_room
from llmc.targets import CpuTarget

# Maximum bytes that compilers write for the kernels, including temporary files.
_ROOM = 64 << 20
# A header of C++, of C and of the kernel, and what has to be linked.
_SOURCE = """\
#include <cstdint>
#include <linux/futex.h>
#include <new>
#include <unistd.h>
extern "C" int64_t* llmc_check() { return new (std::nothrow) int64_t(getpid() + FUTEX_WAIT); }
"""


def check_toolchain(target: CpuTarget, parts: Sequence[Part]) -> None:
    """Compile, archive and link a line of C++ as kernels are.

    Args:
        target: whose kernels are to be compiled.
        parts: the parts of them that are needed.

    Raises:
        LlmcError: the compiler, its assembler, its linker, the archiver or headers are missing; the compiler does not
            know the target; the cache has no room for these parts.
    """
    toolchain, cache = find_toolchain(), open_cache(CacheKind.KERNELS)
    with full_disk_told(cache.path):
        _check(toolchain, target)
    if not all((cache.path / entry_name(target, toolchain, part)).exists() for part in parts):
        require_room(cache.path, _ROOM, content="compiled kernels", elsewhere=ELSEWHERE_CACHED)


@functools.cache
def _check(toolchain: Toolchain, target: CpuTarget) -> None:
    with ScratchDirectory(open_cache(CacheKind.KERNELS).path, ".check") as scratch:
        source, compiled = scratch / "check.cpp", scratch / "check.o"
        source.write_text(_SOURCE, encoding="ascii")
        tools: tuple[tuple[object, ...], ...] = (
            (*toolchain.compiler, *compile_flags(target), "-c", source, "-o", compiled),
            (toolchain.archiver, "rcsD", scratch / "check.a", compiled),
            (*toolchain.compiler, *LINK_FLAGS, scratch / "check.a", compiled, "-o", scratch / "check.so"),
        )
        for command in tools:
            run_tool([str(part) for part in command], source=source, scratch=scratch)
