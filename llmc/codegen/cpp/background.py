"""Compile on another thread while the build goes on: a compiler is a process, so both processors have work.

The kernels are compiled from the start, in case none has before, and the engine's own code while weights are packed
and the report is made.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from llmc.codegen.cpp.build import compile_source
from llmc.codegen.cpp.kernel_library import kernel_archive, parts_of
from llmc.codegen.cpp.lowering import Lowered
from llmc.options import BuildOptions
from llmc.settings import settings
from llmc.targets import CpuTarget


class BackgroundCompiler:
    """Context manager; leaving it by an exception does not wait for running compilations."""

    def __init__(self, target: CpuTarget, options: BuildOptions) -> None:
        self._target = target
        # One thread, so that the engine's code waits for the kernels that it is linked with.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc-compile")
        self._engine: Future[bytes] | None = None
        # Asked for now: a build that has failed may leave the thread behind, and its cache may not be the next one's.
        cache = settings().cache_dir
        self._kernels = [self._thread.submit(kernel_archive, target, cache, part) for part in parts_of(options)]

    def __enter__(self) -> "BackgroundCompiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def start(self, lowered: Lowered, source: Path) -> None:
        """Start compiling a program's source, which is in the file `source`. Raises errors of earlier compilations."""
        for future in self._kernels:
            if future.done():
                future.result()
        self._engine = self._thread.submit(compile_source, lowered, source, self._target)

    def finish(self) -> bytes:
        """The library, once it is compiled; raises what compile_source raises."""
        assert self._engine is not None
        return self._engine.result()
