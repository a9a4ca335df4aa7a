"""The PTX of an engine's kernels: compressed files next to the binaries."""

import zlib
from pathlib import Path

from llmc.engine_format.engine_files import EngineFiles
from llmc.errors import EngineFormatError, TargetError
from llmc.files.typed_json import REBUILD
from llmc.program import DeviceBinary, Program

_MOST_BYTES = 256 << 20


def kept_binaries(program: Program, engine: Path) -> dict[str, DeviceBinary]:
    """Return the binary whose PTX is kept for each kernel that steps launch, by its name.

    Args:
        program: the program of a GPU engine.
        engine: the engine's path, for errors.

    Raises:
        EngineFormatError: the engine was built by an llmc that keeps no PTX.
        TargetError: its kernels are for GPUs that have none.
    """
    binaries: dict[str, DeviceBinary] = {}
    for kernel in program.launched_kernels():
        kept = [binary for binary in kernel.binaries.values() if binary.assembly is not None]
        if not kept and any(not arch.startswith("sm_") for arch in kernel.binaries):
            raise TargetError(
                f"the engine's kernels are for {', '.join(kernel.binaries)}, which have no PTX",
                at=engine,
                fix="run it by executor='triton_interpreter', or build it for a GPU of NVIDIA's",
            )
        if not kept:
            raise EngineFormatError(
                "the engine has no PTX of its kernels: an older llmc built it",
                at=engine,
                fix="rebuild it: llmc build MODEL --target TARGET -o OUT",
            )
        binaries[kernel.name] = kept[0]
    return binaries


def read_ptx(files: EngineFiles, name: str) -> str:
    """The PTX in a file of an engine. Raises EngineFormatError for a damaged one."""
    unpacking = zlib.decompressobj(wbits=31)
    try:
        text = unpacking.decompress(files.read(name), _MOST_BYTES).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise _damaged(files.path / name, str(error)) from None
    if not unpacking.eof:
        raise _damaged(files.path / name, "it ends too early, or is too large")
    return text


def _damaged(path: Path, why: str) -> EngineFormatError:
    return EngineFormatError(f"the file is not compressed PTX: {why}", at=path, fix=REBUILD)
