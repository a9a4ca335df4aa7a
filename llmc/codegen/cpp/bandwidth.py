"""Measure what this machine can deliver, bytes read and multiply-adds: the rooflines that speed is compared with."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from llmc.codegen.cpp.kernel_library import kernel_shared_library
from llmc.errors import LlmcError
from llmc.targets import CpuTarget


def read_bandwidth(target: CpuTarget, threads: int, *, megabytes: int = 256, cache_dir: Path | None = None) -> float:
    """Bytes per second that `threads` threads read from memory: the best of five passes, about 0.2 s in all.

    target: one that this machine can run. megabytes: read in a pass, more than the processor's caches hold.
    Raises ToolchainError without a compiler, LlmcError when the threads cannot be started.
    """
    size = megabytes << 20
    with _pool(target, threads, cache_dir) as (library, pool), mmap.mmap(-1, size) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * size).from_buffer(memory)
        try:
            # Untouched pages would all be read from the one zero page.
            ctypes.memset(view, 1, size)
            address = ctypes.addressof(view)
            return size / min(_seconds(lambda: library.llmc_read_all(pool, address, size)) for _ in range(5))
        finally:
            del view


def multiply_rate(
    target: CpuTarget, threads: int, dtype: Literal["f32", "bf16", "int8"], *, cache_dir: Path | None = None
) -> float:
    """Operations per second of the matrix products' inner loop on operands in cache; about 0.1 s.

    dtype: of the activations and weights.

    Raises as read_bandwidth.
    """
    repeats = 1000
    with _pool(target, threads, cache_dir) as (library, pool):
        run = getattr(library, f"llmc_multiply_in_cache_{dtype}")
        operations: int = run(pool, repeats // 10)
        return operations * 10 / min(_seconds(lambda: run(pool, repeats)) for _ in range(5))


@contextmanager
def _pool(target: CpuTarget, threads: int, cache_dir: Path | None) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    library = ctypes.CDLL(str(kernel_shared_library(target, cache_dir)))
    library.llmc_pool_create.argtypes = (ctypes.c_int32, ctypes.c_int64)
    library.llmc_pool_create.restype = ctypes.c_void_p
    library.llmc_pool_destroy.argtypes = (ctypes.c_void_p,)
    library.llmc_read_all.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    library.llmc_read_all.restype = ctypes.c_uint64
    for dtype in ("f32", "bf16", "int8"):
        multiply = getattr(library, f"llmc_multiply_in_cache_{dtype}")
        multiply.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        multiply.restype = ctypes.c_int64
    pool = library.llmc_pool_create(threads, 64)
    if not pool:
        raise LlmcError(f"{threads} threads cannot be started", fix="ask for fewer threads")
    try:
        yield library, ctypes.c_void_p(pool)
    finally:
        library.llmc_pool_destroy(pool)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
