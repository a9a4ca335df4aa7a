"""Measure what this machine can deliver: bytes read, multiply-adds, loops shared among threads, products."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
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
    with _pool(target, threads, cache_dir) as (library, pool), _Memory(size) as memory:
        return size / min(_seconds(lambda: library.llmc_read_all(pool, memory.address, size)) for _ in range(5))


def multiply_rate(
    target: CpuTarget, threads: int, dtype: Literal["f32", "bf16"], *, cache_dir: Path | None = None
) -> float:
    """Floating-point operations per second of the matrix products' inner loop on operands in cache; about 0.1 s.

    Raises as read_bandwidth.
    """
    repeats = 1000
    with _pool(target, threads, cache_dir) as (library, pool):
        run = getattr(library, f"llmc_multiply_in_cache_{dtype}")
        operations: int = run(pool, repeats // 10)
        return operations * 10 / min(_seconds(lambda: run(pool, repeats)) for _ in range(5))


def region_seconds(target: CpuTarget, threads: int, *, cache_dir: Path | None = None) -> float:
    """Seconds that a parallel loop with nothing in it takes; about 10 ms. Raises as read_bandwidth."""
    repeats = 500
    with _pool(target, threads, cache_dir) as (library, pool):
        library.llmc_empty_regions(pool, repeats)
        return min(_seconds(lambda: library.llmc_empty_regions(pool, repeats)) for _ in range(5)) / repeats


def product_seconds(
    target: CpuTarget,
    threads: int,
    dtype: Literal["f32", "bf16"],
    *,
    tokens: int,
    channels: int,
    rows: int,
    cache_dir: Path | None = None,
) -> float:
    """Seconds of one linear kernel, x [tokens, channels] by a weight [rows, channels] that no cache holds.

    rows: a multiple of 32. The best of five passes. Raises as read_bandwidth.
    """
    itemsize = {"f32": 4, "bf16": 2}[dtype]
    library = ctypes.CDLL(str(kernel_shared_library(target, cache_dir)))
    library.llmc_linear_scratch.restype = ctypes.c_int64
    library.llmc_linear_scratch.argtypes = (ctypes.c_int64, ctypes.c_int64)
    scratch = library.llmc_linear_scratch(tokens, channels)
    weight, x, y = (_Memory(count * itemsize) for count in (rows * channels, tokens * channels, tokens * rows))
    with _pool(target, threads, cache_dir, scratch) as (library, pool), weight, x, y:
        arguments = _Linear(
            tokens, channels, rows, (x.address, channels), weight.address, None, (None, 0), (y.address, rows), 0, 1.0
        )
        run = getattr(library, f"llmc_linear_{dtype}")
        return min(_seconds(lambda: run(pool, ctypes.byref(arguments))) for _ in range(5))


class _Rows(ctypes.Structure):
    """LlmcRows."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Linear(ctypes.Structure):
    """LlmcLinear."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "in", "out")),
        ("x", _Rows),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", _Rows),
        ("y", _Rows),
        ("activation", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _Memory:
    """Zeros in large pages, all of them touched: untouched ones would all be read from the one zero page."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * nbytes).from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
        ctypes.memset(self._view, 0, nbytes)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._view
        self._memory.close()


@contextmanager
def _pool(
    target: CpuTarget, threads: int, cache_dir: Path | None, scratch_bytes: int = 64
) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    library = ctypes.CDLL(str(kernel_shared_library(target, cache_dir)))
    library.llmc_pool_create.argtypes = (ctypes.c_int32, ctypes.c_int64)
    library.llmc_pool_create.restype = ctypes.c_void_p
    library.llmc_pool_destroy.argtypes = (ctypes.c_void_p,)
    library.llmc_read_all.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    library.llmc_read_all.restype = ctypes.c_uint64
    for probe in ("multiply_in_cache_f32", "multiply_in_cache_bf16"):
        function = getattr(library, f"llmc_{probe}")
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        function.restype = ctypes.c_int64
    library.llmc_empty_regions.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.llmc_empty_regions.restype = None
    for product in (library.llmc_linear_f32, library.llmc_linear_bf16):
        product.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        product.restype = None
    pool = library.llmc_pool_create(threads, scratch_bytes)
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
