"""Measure what graph/predict.py wants to know of this machine, with the engine's own kernels on made-up operands.

Each kind of product, and attention, runs on operands in cache with few rows and with many: what it takes for a weight
(or key) and for an operation follows from the two. Then it reads its operands from memory, which shows how much of the
shorter of transfer and arithmetic the longer does not hide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.codegen.cpp.kernel_library import Part, part_of
from llmc.codegen.cpp.probe_operands import PANEL, Attention, Batch, Product
from llmc.codegen.cpp.probes import MAX_CHANNELS, MAX_TOKENS, Memory, Probes, open_probes
from llmc.graph.predict import PLAIN, KindRates, Rates, kind_of
from llmc.program import Launch, Program
from llmc.targets import CpuTarget

# More than caches hold.
_MEMORY_BYTES = 96 << 20
_MULTIPLY_REPEATS = 200
# A thread's share of weights or keys that stay in its cache: two sizes, whose difference is free of what a launch
# costs.
_CACHED_BYTES = (128 << 10, 384 << 10)
# Rows of x, or queries: a decode step of one request, and many.
_FEW, _MANY = 1, 64
_MANY_QUERIES = 16
# Rows of attention's tiles: kAttentionRows.
_ATTENTION_TILE = 64
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


@dataclass(frozen=True)
class _Work:
    """What a launch does. products: multiply-adds. share: tiles over rows, the part of them that unpacks anew."""

    products: float
    share: float


def measured_rates(target: CpuTarget, threads: int, program: Program, *, cache_dir: Path | None = None) -> Rates:
    """The rates of `threads` threads for what the program launches; about 0.1 s a kind.

    target: one that this machine can run. Raises ToolchainError without a compiler, LlmcError when the threads cannot
    be started.
    """
    launches: dict[str, Launch] = {}
    for launch in program.launches:
        launches.setdefault(kind_of(launch), launch)
    attentions = {
        kind: Attention.of(launch, program.caches[0], program.limits.block_size)
        for kind, launch in launches.items()
        if kind.startswith("attention") and program.caches
    }
    products = {kind: Product.of(launch) for kind, launch in launches.items() if "in" in launch.arguments}
    is_coded = any(part_of(launch.kernel) is Part.CODED for launch in launches.values())
    part = Part.CODED if is_coded else Part.PLAIN
    with (
        open_probes(target, threads, cache_dir, part=part, attentions=attentions.values()) as probes,
        Memory(_MEMORY_BYTES) as memory,
    ):
        machine = _Machine(probes, memory, probes.read_bandwidth(memory), probes.region_seconds(), threads)
        kinds = {PLAIN: KindRates(probes.multiply_rate("f32", _MULTIPLY_REPEATS))}
        kinds |= {kind: _product_rates(machine, each, each.tile(target)) for kind, each in products.items()}
        kinds |= {kind: _attention_rates(machine, each) for kind, each in attentions.items()}
    return Rates(machine.bandwidth, kinds, machine.launch, measured=True)


def _product_rates(machine: _Machine, product: Product, tile: int) -> KindRates:
    row_bytes = product.row_bytes(MAX_CHANNELS)

    def seconds(tokens: int, nbytes: int) -> float:
        rows = _panels(nbytes, row_bytes)
        return machine.probes.product_seconds(product, machine.memory, tokens=tokens, channels=MAX_CHANNELS, rows=rows)

    def work(tokens: int, nbytes: int) -> _Work:
        return _Work(_panels(nbytes, row_bytes) * MAX_CHANNELS * tokens, math.ceil(tokens / tile) / tokens)

    rates = _in_cache(machine, (_FEW, _MANY), tile, seconds, work)
    packed = _pack_rate(machine, product, rates)
    rows = _panels(_MEMORY_BYTES, row_bytes)
    whole = rows * row_bytes
    found = seconds(_FEW, whole) - machine.launch - _FEW * MAX_CHANNELS / packed
    return _hidden(machine, KindRates(rates.multiply, rates.unpack, tile, packed), work(_FEW, whole), whole, found)


def _pack_rate(machine: _Machine, product: Product, rates: KindRates) -> float:
    """Elements of x a second: what a product with a single panel of weights, which is one thread's work, takes
    longer than its arithmetic."""
    elements = MAX_TOKENS * MAX_CHANNELS
    seconds = machine.probes.product_seconds(
        product, machine.memory, tokens=MAX_TOKENS, channels=MAX_CHANNELS, rows=PANEL
    )
    work = _Work(elements * PANEL, math.ceil(MAX_TOKENS / rates.tile) / MAX_TOKENS)
    return elements / max(seconds - machine.threads * _arithmetic(rates, work), 1e-6)


def _attention_rates(machine: _Machine, attention: Attention) -> KindRates:
    group = attention.heads // attention.kv_heads
    block_bytes = sum(attention.block_bytes)
    in_memory = _MEMORY_BYTES // block_bytes
    order = list(range(in_memory))
    random.Random(0).shuffle(order)

    def batch(queries: int, nbytes: int) -> Batch:
        blocks = max(1, nbytes // block_bytes)
        return Batch.of(1, queries, max(queries, blocks * attention.block_size), order[:blocks])

    def work_of(each: Batch) -> _Work:
        channels = attention.head_dim + attention.value_dim
        rows = group * each.queries
        return _Work(each.pairs * attention.heads * channels, math.ceil(rows / _ATTENTION_TILE) / rows)

    def seconds(queries: int, nbytes: int) -> float:
        return machine.probes.attention_seconds(attention, machine.memory, batch(queries, nbytes))

    def work(queries: int, nbytes: int) -> _Work:
        return work_of(batch(queries, nbytes))

    rates = _in_cache(machine, (_FEW, _MANY_QUERIES), _ATTENTION_TILE, seconds, work)
    each = in_memory // _REQUESTS
    decode = Batch.of(_REQUESTS, 1, each * attention.block_size, order[: each * _REQUESTS])
    found = machine.probes.attention_seconds(attention, machine.memory, decode) - machine.launch
    return _hidden(machine, rates, work_of(decode), each * _REQUESTS * block_bytes, found)


def _in_cache(
    machine: _Machine,
    rows: tuple[int, int],
    tile: int,
    seconds: Callable[[int, int], float],
    work: Callable[[int, int], _Work],
) -> KindRates:
    """multiply and unpack, from the seconds that a product of each number of rows takes in cache: two equations
    seconds / products = 2 / multiply + share / unpack."""
    small, large = (nbytes * machine.threads for nbytes in _CACHED_BYTES)
    few, many = (
        (
            max(seconds(count, large) - seconds(count, small), 1e-9)
            / (work(count, large).products - work(count, small).products)
        )
        for count in rows
    )
    shares = [work(count, large).share for count in rows]
    unpacking = (few - many) / (shares[0] - shares[1])
    multiplying = many - shares[1] * unpacking
    if unpacking <= 0 or multiplying <= 0:  # Disturbed, or so fast that one of the two is nothing.
        return KindRates(2 / many, None, tile)
    return KindRates(2 / multiplying, 1 / unpacking, tile)


def _hidden(machine: _Machine, rates: KindRates, work: _Work, nbytes: int, seconds: float) -> KindRates:
    """The rates with `serial`. seconds: of a launch that does this work and reads as many bytes of memory."""
    shorter, longer = sorted((nbytes / machine.bandwidth, _arithmetic(rates, work)))
    return KindRates(rates.multiply, rates.unpack, rates.tile, rates.pack, max(0.0, (seconds - longer) / shorter))


def _arithmetic(rates: KindRates, work: _Work) -> float:
    unpacking = 0.0 if rates.unpack is None else work.products * work.share / rates.unpack
    return 2 * work.products / rates.multiply + unpacking


def _panels(nbytes: int, row_bytes: int) -> int:
    """Rows of whole panels that so many bytes hold; one panel at least."""
    return max(1, nbytes // (row_bytes * PANEL)) * PANEL
