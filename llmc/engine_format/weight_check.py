"""Compare an engine's files with their hashes, before the engine is used or while it starts."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llmc.engine_format.chunk_hash import check_chunk
from llmc.engine_format.engine_files import EngineFiles, is_weights
from llmc.processes.processors import usable_processors

# Threads beyond which memory gives no more.
_MOST_THREADS = 8


class WeightCheck:
    """Compares the weights' XXH3, and then the other files' SHA-256, in its own threads, from now on. Weights of an
    engine inside it are checked when that is opened.

    A caller that runs the engine meanwhile must not release results before `wait` has returned. Other files are
    compared when they are read.
    """

    def __init__(self, files: EngineFiles) -> None:
        work = [
            partial(check_chunk, "XXH3", files.mapped(name), index, digest, files.path / name)
            for name in files.below("weights")
            for index, digest in enumerate(files.records[name].xxh3)
        ]
        work += [partial(_read, files, name) for name in files.records if not is_weights(name)]
        # One core is left to the start, as far as there are several.
        self._pool = _pool(usable_processors() - 1)
        self._parts = [self._pool.submit(task) for task in work]
        self._pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until all files are compared. Raises EngineFormatError, on every call, for the first corrupt file."""
        for part in self._parts:
            part.result()

    def cancel(self) -> None:
        """Stop comparing, and release all waiting callers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def compare_hashes(files: EngineFiles, names: Iterable[str]) -> None:
    """Compare these files' SHA-256. Raises EngineFormatError for the first chunk that is corrupt."""
    with _pool(usable_processors()) as pool:
        parts = [
            pool.submit(check_chunk, "SHA-256", files.mapped(name), index, digest, files.path / name)
            for name in names
            for index, digest in enumerate(files.records[name].sha256)
        ]
        for part in parts:
            part.result()


def _read(files: EngineFiles, name: str) -> None:
    files.read(name)


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, threads)), "llmc-check")
