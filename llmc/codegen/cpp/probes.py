"""Measure what this machine can deliver: bytes read, multiply-adds, loops shared among threads, whole products."""

import ctypes
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from llmc.codegen.cpp.kernel_library import Part, load_kernels
from llmc.codegen.cpp.panel import PANEL
from llmc.codegen.cpp.probe_operands import Attention, Batch, Lookup, Product
from llmc.errors import LlmcError
from llmc.targets import CpuTarget

Operands = Literal["f32", "bf16", "int8"]
# Maximum tokens and channels of measured products, for which the threads' scratch memory is allocated.
MAX_TOKENS, MAX_CHANNELS = 512, 2048
_RUNS, _ENOUGH_SECONDS = 5, 0.01
_LOOKUPS = 33
_LEAST_MEGABYTES = 256
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def read_bandwidth(
    target: CpuTarget, threads: int, *, megabytes: int | None = None, cache_dir: Path | None = None
) -> float:
    """Bytes per second that `threads` threads read from memory: the best of five passes, about 0.2 s in total.

    target: one that this machine can run. megabytes: read in a pass; by default twice what the processor's largest
    cache holds, and 256 at least. Raises ToolchainError without a compiler, LlmcError when the threads cannot be
    started.
    """
    if megabytes is None:
        megabytes = max(_LEAST_MEGABYTES, 2 * largest_cache_bytes() >> 20)
    with open_probes(target, threads, cache_dir) as probes, Memory(megabytes << 20) as memory:
        return probes.read_bandwidth(memory)


def multiply_rate(target: CpuTarget, threads: int, dtype: Operands, *, cache_dir: Path | None = None) -> float:
    """Floating-point operations per second of the matrix products' inner loop on operands in cache; about 0.1 s.

    Raises as read_bandwidth.
    """
    with open_probes(target, threads, cache_dir) as probes:
        return probes.multiply_rate(dtype, 1000)


def largest_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache that Linux reports; 0 if it reports none."""
    texts = [path.read_text(encoding="ascii").strip() for path in caches.glob("index*/size")]
    return max((int(text.removesuffix("K")) << 10 for text in texts), default=0)


@contextmanager
def open_probes(
    target: CpuTarget,
    threads: int,
    cache_dir: Path | None = None,
    *,
    part: Part = Part.PLAIN,
    attentions: Iterable[Attention] = (),
) -> "Iterator[Probes]":
    """The kernels of the target with `threads` running threads. Raises as read_bandwidth.

    part: CODED to include kernels of codes. attentions: those that will be measured.
    """
    library = load_kernels(target, cache_dir, part)
    scratch: int = library.llmc_linear_scratch(MAX_TOKENS, MAX_CHANNELS)
    for attention in attentions:
        shape = (attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim)
        scratch = max(scratch, library.llmc_paged_attention_scratch(*shape))
    pool = library.llmc_pool_create(threads, scratch)
    if not pool:
        raise LlmcError(f"{threads} threads cannot be started", fix="use fewer threads")
    try:
        yield Probes(library, pool)
    finally:
        library.llmc_pool_destroy(pool)


class Probes:
    """Measurements of the machine. Each takes the best of several runs, because the others were disturbed."""

    def __init__(self, library: ctypes.CDLL, pool: int) -> None:
        self._library, self._pool = library, ctypes.c_void_p(pool)

    def read_bandwidth(self, memory: "Memory") -> float:
        """Bytes a second."""
        return memory.nbytes / _best(lambda: self._read(memory))

    def read_seconds(self, memory: "Memory") -> float:
        """Seconds of one pass over the memory."""
        return _seconds(lambda: self._read(memory))

    def _read(self, memory: "Memory") -> None:
        self._library.llmc_read_all(self._pool, memory.address, memory.nbytes)

    def multiply_rate(self, dtype: Operands, repeats: int) -> float:
        """Floating-point operations per second on operands in cache. repeats: repetitions of some microseconds each."""
        run = getattr(self._library, f"llmc_multiply_in_cache_{dtype}")
        operations: int = run(self._pool, max(1, repeats // 10))
        return operations / max(1, repeats // 10) * repeats / _best(lambda: run(self._pool, repeats))

    def region_seconds(self) -> float:
        """Seconds of a parallel loop with nothing in it."""
        repeats = 500
        return _best(lambda: self._library.llmc_empty_regions(self._pool, repeats)) / repeats

    def product_seconds(self, product: Product, weight: "Memory", *, tokens: int, channels: int, rows: int) -> float:
        """Seconds of one linear kernel, x [tokens, channels] by a weight [rows, channels] in that memory.

        tokens, channels: at most MAX_TOKENS, MAX_CHANNELS. rows: a multiple of 32.
        """
        assert tokens <= MAX_TOKENS and channels <= MAX_CHANNELS and rows * product.row_bytes(channels) <= weight.nbytes
        with Memory(tokens * channels * 4) as x, Memory(tokens * rows * 4) as y:
            arguments = product.arguments(tokens, channels, rows, x.address, weight.address, y.address)
            return self._kernel_seconds(product.function, arguments)

    def attention_seconds(self, attention: Attention, caches: "Memory", batch: Batch) -> float:
        """Seconds of one attention kernel over caches that share that memory."""
        keys, values = attention.block_bytes
        v_cache = caches.address + caches.nbytes // (keys + values) * keys // 64 * 64
        tokens = batch.requests * batch.queries
        with (
            Memory(tokens * attention.heads * attention.head_dim * 4) as q,
            Memory(tokens * attention.heads * attention.value_dim * 4) as y,
        ):
            arguments = attention.arguments(batch, q.address, (caches.address, v_cache), y.address)
            return self._kernel_seconds(attention.function, arguments)

    def lookup_seconds(self, lookup: Lookup, weight: "Memory") -> float:
        """Seconds to look up one token, whose panel is in no cache."""
        panels = weight.nbytes // lookup.panel_bytes
        token = ctypes.c_int32()
        seconds = []
        run = getattr(self._library, lookup.function)
        with Memory(lookup.row_bytes) as y:
            arguments = lookup.arguments(ctypes.addressof(token), weight.address, y.address)
            for panel in random.Random(0).sample(range(panels), min(panels, _LOOKUPS)):
                token.value = panel * PANEL
                seconds.append(_seconds(lambda: run(self._pool, ctypes.addressof(arguments))))
        return statistics.median(seconds)

    def _kernel_seconds(self, function: str, arguments: ctypes.Structure) -> float:
        run = getattr(self._library, function)
        address = ctypes.addressof(arguments)
        run(self._pool, address)
        return _best(lambda: run(self._pool, address))


class Memory:
    """Zeros in large pages, all of them touched: untouched ones would all be read from the one zero page."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * nbytes).from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
        ctypes.memset(self._view, 0, nbytes)

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, *error: object) -> None:
        del self._view
        self._memory.close()


def _best(run: Callable[[], object]) -> float:
    """The best time of five runs, or of the runs that fit into a hundredth of a second."""
    seconds = [_seconds(run) for _ in range(_RUNS)]
    while sum(seconds) < _ENOUGH_SECONDS:
        seconds.append(_seconds(run))
    return min(seconds)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
