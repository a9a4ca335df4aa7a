"""One process that compiles kernels for GPUs, for all tests of a test process: each imports torch and Triton anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from llmc.cache import CacheKind, open_cache
from llmc.codegen.triton.compile import Workers


class StartedByNeed(Workers):
    """Nearly all kernels are found in the cache."""

    def start(self) -> None:
        pass


class KeptCompiler:
    """Stands where `Workers` are opened. The process is started when it is first asked, and not ended by those who are
    done with it; where another cache is used, they are given processes of their own."""

    def __init__(self, until: ExitStack) -> None:
        self._until = until
        self._cache = open_cache(CacheKind.TRITON).path.resolve()
        self._kept: Workers | None = None

    def workers(self) -> Workers:
        """The process, for a cache like that of the beginning."""
        if self._kept is None:
            self._kept = self._until.enter_context(StartedByNeed(1))
        return self._kept

    def __call__(self, count: int) -> AbstractContextManager[Workers]:
        has_same_cache = open_cache(CacheKind.TRITON).path.resolve() == self._cache
        return nullcontext(self.workers()) if has_same_cache else StartedByNeed(1)


@contextmanager
def kept_compiler() -> Iterator[KeptCompiler]:
    """Ends the process."""
    with ExitStack() as until:
        yield KeptCompiler(until)
