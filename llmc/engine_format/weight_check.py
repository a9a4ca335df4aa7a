"""Compare an engine's weights with their hashes: all before it is used, or beside its start."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from llmc.engine_format.chunk_hash import check_chunk_sha256, check_chunk_xxh3
from llmc.engine_format.engine_files import WEIGHTS, EngineFiles

_CheckChunk = Callable[[memoryview, int, str, Path], None]
# Threads beyond which memory gives no more.
_MOST_THREADS = 8


class WeightCheck:
    """Compares the weights' XXH3 in threads of its own, from now on.

    Who runs the engine meanwhile keeps to himself what came out until `wait` has returned.
    """

    def __init__(self, files: EngineFiles) -> None:
        self._pool, self._chunks = _submit(files, check_chunk_xxh3, {n: r.xxh3 for n, r in files.records.items()})

    def wait(self) -> None:
        """Until all are compared. Raises EngineFormatError, each time, for the first that is corrupt."""
        for chunk in self._chunks:
            chunk.result()

    def cancel(self) -> None:
        """Compare no more; nobody waits any longer."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_weights(files: EngineFiles) -> None:
    """Compare the weights' SHA-256. Raises EngineFormatError for the first chunk that is corrupt."""
    pool, chunks = _submit(files, check_chunk_sha256, {n: r.sha256 for n, r in files.records.items()})
    with pool:
        for chunk in chunks:
            chunk.result()


def _submit(
    files: EngineFiles, check: _CheckChunk, digests: dict[str, tuple[str, ...]]
) -> tuple[ThreadPoolExecutor, list[Future[None]]]:
    work = [
        partial(check, files.mapped(name).data, index, digest, files.path / name)
        for name in sorted(digests)
        if name.startswith(WEIGHTS)
        for index, digest in enumerate(digests[name])
    ]
    pool = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "llmc-weight-check")
    chunks = [pool.submit(each) for each in work]
    pool.shutdown(wait=False)
    return pool, chunks
