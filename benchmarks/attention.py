"""Paged attention beside torch's SDPA: decode in GB/s of keys and values read, prefill in GFLOP/s.

Run: python -m benchmarks.attention [--threads 2] [--dtype bf16] [--kv-cache int8] [--json]. The shape is
Llama-3.2-1B's: 32 query heads on 8 KV heads of 64 channels, in blocks of 16 positions. Caches of many layers are read
in turn, 256 MB of bf16 in all, so that none is still in the processor's cache; blocks lie in order, as a fresh server
hands them out, or shuffled, as an old one does. SDPA gets the form that suits it best: contiguous keys and values, of
the activations' type; in decode the queries of a KV head as its tokens, in prefill a copy of the keys and values for
each query head.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import alternate
from llmc.formats.cache_format import CacheFormat, parse_cache_format
from llmc.targets import CpuTarget, host_target
from tests.codegen.cpp.kernel_calls import kernel_call, kernels, open_pool
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 64, 16
DECODES = ((1, 512), (1, 4096), (1, 8192), (8, 4096), (32, 1024))  # batch, context
ORDERS = {"in order": False, "shuffled": True}
PREFILLS = (128, 512, 2048)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row of the table. work: bytes of keys and values of a decode, floating-point operations of a prefill."""

    name: str
    work: float
    unit: str
    layers: tuple[PagedBatch, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kv-cache", type=parse_cache_format, help="codes in place of numbers: int8, int4, fp8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    results: list[dict[str, float | str]] = []
    format = options.kv_cache
    decodes = (decode(batch, context, order, dtype, format) for order in ORDERS for batch, context in DECODES)
    for case in chain(decodes, (prefill(n, dtype, format) for n in PREFILLS)):
        results.append(measure(case, options.threads))
        if not options.json:
            print(
                "  ".join(
                    f"{key} {value:.1f}" if isinstance(value, float) else value for key, value in results[-1].items()
                ),
                flush=True,
            )
    if options.json:
        print(json.dumps({"target": host_target().name, "threads": options.threads, "cases": results}))


def decode(batch: int, context: int, order: str, dtype: torch.dtype, format: CacheFormat | None) -> Case:
    """One token of each request in every layer."""
    shared = paged_batch(
        [(context, 1)] * batch * _layers(batch * context),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        shuffled=ORDERS[order],
    )
    shared = shared if format is None else shared.coded(format)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    layers = tuple(
        replace(
            shared,
            q=shared.q[i : i + batch],
            query_starts=starts,
            context_lens=shared.context_lens[i : i + batch],
            block_tables=shared.block_tables[i : i + batch],
        )
        for i in range(0, len(shared.context_lens), batch)
    )
    row_bytes = HEAD_DIM * dtype.itemsize if format is None else format.position_bytes(HEAD_DIM)
    work = 2.0 * batch * context * KV_HEADS * row_bytes * len(layers)
    return Case(f"decode {batch}×{context}, blocks {order}", work, "GB/s", layers)


def prefill(tokens: int, dtype: torch.dtype, format: CacheFormat | None) -> Case:
    """One prompt, whole, in every layer. Half of the score matrix counts as work."""
    layer = paged_batch([(tokens, tokens)], heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    layer = layer if format is None else layer.coded(format)
    return Case(f"prefill {tokens}", 2.0 * tokens * tokens * HEADS * HEAD_DIM * LAYERS, "GFLOP/s", (layer,) * LAYERS)


def measure(case: Case, threads: int) -> dict[str, float | str]:
    """Ours and SDPA in turn, with the read bandwidth in the same rounds."""
    target = host_target()
    with open_pool(target, threads, case.layers[0].scratch(target)) as pool:
        samples = alternate({"llmc": _ours(case, target, pool), "sdpa": _sdpa(case), "probe": _probe(target, pool)})
    ours, peer, probe = (samples[name].median for name in ("llmc", "sdpa", "probe"))
    result: dict[str, float | str] = {
        "case": case.name,
        "ms": 1e3 * ours,
        f"llmc {case.unit}": case.work / ours / 1e9,
        "spread %": 100 * samples["llmc"].spread,
        f"sdpa {case.unit}": case.work / peer / 1e9,
        "ratio": peer / ours,
    }
    if case.unit == "GB/s":
        result |= {
            "probe GB/s": _PROBE_BYTES / probe / 1e9,
            "% of probe": 100 * (case.work / ours) / (_PROBE_BYTES / probe),
        }
    return result


_PROBE_BYTES = 1 << 28


def _ours(case: Case, target: CpuTarget, pool: ctypes.c_void_p) -> Callable[[], float]:
    outputs = [torch.empty(layer.q.shape[0], HEADS * HEAD_DIM, dtype=layer.q.dtype) for layer in case.layers]
    pairs = zip(case.layers, outputs, strict=True)
    calls = [kernel_call(target, "paged_attention", layer.dtypes, layer.values(y)) for layer, y in pairs]

    def run() -> float:
        start = perf_counter()
        for call in calls:
            call(pool)
        return perf_counter() - start

    return run


def _sdpa(case: Case) -> Callable[[], float]:
    first = case.layers[0]
    batch, tokens = len(first.context_lens), first.q.shape[0] // len(first.context_lens)
    context = int(first.context_lens[0])
    decoding = tokens == 1
    heads, queries = (KV_HEADS, HEADS // KV_HEADS) if decoding else (HEADS, tokens)
    inputs = [
        [torch.randn(batch, heads, length, HEAD_DIM).to(first.q.dtype) for length in (queries, context, context)]
        for _ in dict.fromkeys(id(layer) for layer in case.layers)
    ]

    def run() -> float:
        start = perf_counter()
        for i in range(len(case.layers)):
            q, k, v = inputs[i % len(inputs)]
            scaled_dot_product_attention(q, k, v, is_causal=not decoding)
        return perf_counter() - start

    return run


def _probe(target: CpuTarget, pool: ctypes.c_void_p) -> Callable[[], float]:
    data = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    read = kernels(target).llmc_read_all

    def run() -> float:
        start = perf_counter()
        read(pool, ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(_PROBE_BYTES))
        return perf_counter() - start

    return run


def _layers(positions: int) -> int:
    """Enough for 256 MB of bf16 in all."""
    return -(-(1 << 28) // (2 * positions * KV_HEADS * HEAD_DIM * 2))


if __name__ == "__main__":
    main()
