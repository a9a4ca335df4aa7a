"""Measure what this machine's memory can deliver: the roofline that decode speed is compared with."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

from llmc.codegen.cpp.kernel_library import kernel_shared_library
from llmc.errors import LlmcError
from llmc.targets import CpuTarget


def read_bandwidth(target: CpuTarget, threads: int, *, megabytes: int = 256, cache_dir: Path | None = None) -> float:
    """Bytes per second that `threads` threads read from memory: the best of five passes, about 0.2 s in all.

    target: one that this machine can run. megabytes: read in a pass, more than the processor's caches hold.
    Raises ToolchainError without a compiler, LlmcError when the threads cannot be started.
    """
    library = ctypes.CDLL(str(kernel_shared_library(target, cache_dir)))
    library.llmc_pool_create.argtypes = (ctypes.c_int32, ctypes.c_int64)
    library.llmc_pool_create.restype = ctypes.c_void_p
    library.llmc_pool_destroy.argtypes = (ctypes.c_void_p,)
    library.llmc_read_all.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    library.llmc_read_all.restype = ctypes.c_uint64
    size = megabytes << 20
    pool = library.llmc_pool_create(threads, 64)
    if not pool:
        raise LlmcError(f"{threads} threads cannot be started", fix="ask for fewer threads")
    try:
        with mmap.mmap(-1, size) as memory:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            view = (ctypes.c_char * size).from_buffer(memory)
            try:
                # Untouched pages would all be read from the one zero page.
                ctypes.memset(view, 1, size)
                address = ctypes.addressof(view)
                return size / min(_seconds(library, pool, address, size) for _ in range(5))
            finally:
                del view
    finally:
        library.llmc_pool_destroy(pool)


def _seconds(library: ctypes.CDLL, pool: int, address: int, size: int) -> float:
    start = time.perf_counter()
    library.llmc_read_all(pool, address, size)
    return time.perf_counter() - start
