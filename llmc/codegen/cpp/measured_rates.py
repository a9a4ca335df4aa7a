"""Measure this machine's rates for llmc/prediction, with the engine's own kernels on synthetic operands.

Each kind of product, and attention, runs on operands in cache with several numbers of rows: what it reaches with each.
Then it reads its operands from memory, which shows how much of the shorter of transfer and arithmetic the longer does
not hide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmc.codegen.cpp.kernel_library import PAGED_ATTENTION, Part, part_of
from llmc.codegen.cpp.panel import PANEL
from llmc.codegen.cpp.probe_operands import Attention, Batch, Lookup, Product
from llmc.codegen.cpp.probes import MAX_CHANNELS, MAX_TOKENS, Memory, Probes, open_probes
from llmc.prediction.launch_cost import ATTENTION_KEYS, LOOKUP, PLAIN, kind_of
from llmc.prediction.rates import KindRates, Rates, Reach
from llmc.program import Launch, Program
from llmc.targets import CpuTarget

# More than caches hold.
_MEMORY_BYTES = 256 << 20
_MULTIPLY_REPEATS = 200
# A thread's share of weights or keys that stay in its cache, and the number of repetitions: the difference between
# several and one is free of the launch overhead.
_CACHED_BYTES, _SHARES = 128 << 10, 3
# Minimum share of the proportional time that several repetitions must take beyond one: launch overhead is a minor part,
# and another process may have slowed down the single one.
_LEAST_SHARE = 0.25
# Rows of x: a decode step of one request, of some, and of many; prompts.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
# Tokens of a request that ask at a time, likewise.
_QUERIES = (1, 4, 16, 64)
# Requests of the attention that reads from memory, each with a share of it.
_REQUESTS = 16


@dataclass(frozen=True)
class _Machine:
    """Open probes, with memory for operands and what was measured already."""

    probes: Probes
    memory: Memory
    bandwidth: float
    launch: float
    threads: int


def measured_rates(target: CpuTarget, threads: int, program: Program, *, cache_dir: Path | None = None) -> Rates:
    """Measure the rates of `threads` threads for the kernels that the program launches; some tenths of a second per
    kind.

    target: one that this machine can run. Raises ToolchainError without a compiler, LlmcError when the threads cannot
    be started.
    """
    launches: dict[str, Launch] = {}
    for launch in program.launches:
        launches.setdefault(kind_of(launch), launch)
    attentions = {
        kind: Attention.of(launch, program.caches[0], program.limits.block_size)
        for kind, launch in launches.items()
        if launch.family == PAGED_ATTENTION and program.caches
    }
    products = {kind: Product.of(launch) for kind, launch in launches.items() if "in" in launch.arguments}
    is_coded = any(part_of(launch.family, launch.dtypes) is Part.CODED for launch in launches.values())
    part = Part.CODED if is_coded else Part.PLAIN
    with (
        open_probes(target, threads, cache_dir, part=part, attentions=attentions.values()) as probes,
        Memory(_MEMORY_BYTES) as memory,
    ):
        machine = _Machine(probes, memory, probes.read_bandwidth(memory), probes.region_seconds(), threads)
        plain = KindRates(probes.multiply_rate("f32", _MULTIPLY_REPEATS))
        kinds = {PLAIN: plain}
        kinds |= {kind: _product_rates(machine, product) for kind, product in products.items()}
        kinds |= {kind: _attention_rates(machine, attention) for kind, attention in attentions.items()}
        if LOOKUP in launches:
            lookup = Lookup.of(launches[LOOKUP])
            kinds[LOOKUP] = replace(plain, bandwidth=lookup.row_bytes / probes.lookup_seconds(lookup, memory))
    return Rates(machine.bandwidth, kinds, machine.launch, measured=True)


def _product_rates(machine: _Machine, product: Product) -> KindRates:
    row_bytes = product.row_bytes(MAX_CHANNELS)

    def seconds(tokens: int, nbytes: int) -> float:
        rows = _panels(nbytes, row_bytes)
        return machine.probes.product_seconds(product, machine.memory, tokens=tokens, channels=MAX_CHANNELS, rows=rows)

    def flops(tokens: int, nbytes: int) -> float:
        return 2 * _panels(nbytes, row_bytes) * MAX_CHANNELS * tokens

    rates = _in_cache(machine, row_bytes * PANEL, [(count, count) for count in _ROWS], seconds, flops)
    rates = replace(rates, pack=_pack_rate(machine, product, rates))
    whole = _panels(_MEMORY_BYTES, row_bytes) * row_bytes
    return _with_serial(machine, rates, 1, whole, flops(1, whole), seconds(1, whole) - machine.launch)


def _pack_rate(machine: _Machine, product: Product, rates: KindRates) -> float:
    """Elements of x a second: what a product with a single panel of weights, which is one thread's work, takes
    longer than its arithmetic."""
    elements = MAX_TOKENS * MAX_CHANNELS
    seconds = machine.probes.product_seconds(
        product, machine.memory, tokens=MAX_TOKENS, channels=MAX_CHANNELS, rows=PANEL
    )
    arithmetic = 2 * elements * PANEL / (rates.multiply * rates.share(MAX_TOKENS)) * machine.threads
    return elements / max(seconds - arithmetic, 1e-6)


def _attention_rates(machine: _Machine, attention: Attention) -> KindRates:
    group = attention.heads // attention.kv_heads
    block_bytes = sum(attention.block_bytes)
    tile = max(1, ATTENTION_KEYS // attention.block_size)
    in_memory = _MEMORY_BYTES // block_bytes // (tile * _REQUESTS) * tile * _REQUESTS
    order: list[int] = np.random.default_rng(0).permutation(in_memory).tolist()

    def batch(queries: int, nbytes: int) -> Batch:
        blocks = max(1, nbytes // block_bytes // tile) * tile
        return Batch.of(1, queries, blocks * attention.block_size, order[:blocks])

    def flops_of(batch: Batch) -> float:
        return 2 * batch.pairs * attention.heads * (attention.head_dim + attention.value_dim)

    def seconds(queries: int, nbytes: int) -> float:
        return machine.probes.attention_seconds(attention, machine.memory, batch(queries, nbytes))

    def flops(queries: int, nbytes: int) -> float:
        return flops_of(batch(queries, nbytes))

    rates = _in_cache(machine, block_bytes * tile, [(count, group * count) for count in _QUERIES], seconds, flops)
    decode = Batch.of(_REQUESTS, 1, in_memory // _REQUESTS * attention.block_size, order)
    decode_seconds = machine.probes.attention_seconds(attention, machine.memory, decode) - machine.launch
    return _with_serial(machine, rates, group, in_memory * block_bytes, flops_of(decode), decode_seconds)


def _in_cache(
    machine: _Machine,
    least: int,
    counts: Sequence[tuple[int, int]],
    seconds: Callable[[int, int], float],
    flops: Callable[[int, int], float],
) -> KindRates:
    """multiply and reach. least: bytes that are read at a time; the keys of many heads are more than caches hold.
    counts: numbers of tokens, each with the number of rows that they make."""
    small = max(_CACHED_BYTES * machine.threads, least)
    large = _SHARES * small
    reached = {}
    for count, rows in counts:
        whole, more = seconds(count, large), flops(count, large) - flops(count, small)
        least_seconds = whole * more / flops(count, large) * _LEAST_SHARE
        reached[rows] = more / max(whole - seconds(count, small), least_seconds)
    multiply = max(reached.values())
    return KindRates(multiply, tuple(Reach(rows, rate / multiply) for rows, rate in reached.items()))


def _with_serial(
    machine: _Machine, rates: KindRates, rows: int, nbytes: int, flops: float, seconds: float
) -> KindRates:
    """seconds: time of a launch that does this work and reads this number of bytes."""
    transfer, arithmetic = nbytes / machine.bandwidth, flops / (rates.multiply * rates.share(rows))
    shorter, longer = sorted((transfer, arithmetic))
    return replace(rates, serial=max(0.0, (seconds - longer) / shorter))


def _panels(nbytes: int, row_bytes: int) -> int:
    """Rows of whole panels that fit into `nbytes` bytes; at least one panel."""
    return max(1, nbytes // (row_bytes * PANEL)) * PANEL
