"""Paged attention beside torch's SDPA: decode in GB/s of keys and values read, prefill in GFLOP/s.

Run: python -m benchmarks.attention [--threads 2] [--dtype bf16] [--kv-cache auto int8 int4] [--json]. The shape is
Llama-3.2-1B's: 32 query heads on 8 KV heads of 64 channels, in blocks of 16 positions. Several cache formats are
measured in turn, and each is compared with the first. Caches of many layers are read in turn, 256 MB of bf16 in all,
so that none is still in the processor's cache. Blocks lie in order, as a fresh server hands them out, or shuffled, as
an old one does. SDPA gets the form that suits it best: contiguous keys and values of the activations' type; in decode
the queries of a KV head as its tokens, in prefill a copy of the keys and values for each query head.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import alternate
from llmc.formats.cache_format import CacheFormats, parse_cache_formats
from llmc.targets import CpuTarget, host_target
from tests.codegen.cpp.kernel_calls import kernel_call, kernels, open_pool
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 64, 16
DECODES = ((1, 512), (1, 4096), (1, 8192), (8, 4096), (32, 1024))  # batch, context
ORDERS = {"in order": False, "shuffled": True}
PREFILLS = (128, 512, 2048)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Form:
    """A cache format's layers. work: bytes of keys and values of a decode, floating-point operations of a prefill."""

    work: float
    layers: tuple[PagedBatch, ...]


@dataclass(frozen=True)
class Case:
    """One row of the table. forms: by cache format, the first being what the others are compared with."""

    name: str
    unit: str
    forms: dict[str, Form]

    @property
    def layers(self) -> tuple[PagedBatch, ...]:
        """Of the first form."""
        return next(iter(self.forms.values())).layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kv-cache", nargs="+", default=["auto"], help="auto, or codes: int8, int4:recent=128")
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    results: list[dict[str, float | str]] = []
    formats = {text: None if text == "auto" else parse_cache_formats(text) for text in options.kv_cache}
    makers = {
        **{
            f"decode {n}×{context}, blocks {order}": partial(decode, n, context, ORDERS[order], dtype, formats)
            for order in ORDERS
            for n, context in DECODES
        },
        **{f"prefill {n}": partial(prefill, n, dtype, formats) for n in PREFILLS},
    }
    for name, make in makers.items():
        if options.cases not in name:
            continue
        results += measure(Case(name, "GB/s" if name.startswith("decode") else "GFLOP/s", make()), options.threads)
        if not options.json:
            for result in results[-len(formats) :]:
                print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else v for k, v in result.items()), flush=True)
    if options.json:
        print(json.dumps({"target": host_target().name, "threads": options.threads, "cases": results}))


def decode(
    batch: int, context: int, shuffled: bool, dtype: torch.dtype, formats: dict[str, CacheFormats | None]
) -> dict[str, Form]:
    """One token of each request in every layer."""
    numbers = paged_batch(
        [(context, 1)] * batch * _layers(batch * context),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        shuffled=shuffled,
    )
    forms = {}
    for name, format in formats.items():
        layers = _layers_of(_stored(numbers, format), batch)
        forms[name] = Form(float(batch * _context_bytes(format, context, dtype) * len(layers)), layers)
    return forms


def _stored(numbers: PagedBatch, format: CacheFormats | None) -> PagedBatch:
    """A batch over caches in this form."""
    if format is None:
        return numbers
    return numbers.coded(format) if format.recent is None else numbers.apart(format.of_codes, format.recent)


def _context_bytes(format: CacheFormats | None, context: int, dtype: torch.dtype) -> int:
    """The bytes of keys and values that a token reads."""
    of_number = 2 * HEAD_DIM * dtype.itemsize
    of_code = of_number if format is None else sum(f.position_bytes(HEAD_DIM) for f in (format.keys, format.values))
    exact = min(context, format.recent or 0) if format is not None else 0
    return KV_HEADS * ((context - exact) * of_code + exact * of_number)


def _layers_of(shared: PagedBatch, batch: int) -> tuple[PagedBatch, ...]:
    starts = torch.arange(batch + 1, dtype=torch.int32)
    return tuple(
        replace(
            shared,
            q=shared.q[i : i + batch],
            query_starts=starts,
            context_lens=shared.context_lens[i : i + batch],
            block_tables=shared.block_tables[i : i + batch],
            newest=None
            if shared.newest is None
            else replace(shared.newest, tables=shared.newest.tables[i : i + batch]),
        )
        for i in range(0, len(shared.context_lens), batch)
    )


def prefill(tokens: int, dtype: torch.dtype, formats: dict[str, CacheFormats | None]) -> dict[str, Form]:
    """One prompt, whole, in every layer. Half of the score matrix counts as work."""
    layer = paged_batch([(tokens, tokens)], heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    work = 2.0 * tokens * tokens * HEADS * HEAD_DIM * LAYERS
    return {name: Form(work, (_stored(layer, format),) * LAYERS) for name, format in formats.items()}


def measure(case: Case, threads: int) -> list[dict[str, float | str]]:
    """Every form and SDPA in turn, with the read bandwidth in the same rounds."""
    target = host_target()
    with open_pool(target, threads, case.layers[0].scratch(target)) as pool:
        runs = {name: _ours(form.layers, target, pool) for name, form in case.forms.items()}
        samples = alternate({**runs, "sdpa": _sdpa(case), "probe": _probe(target, pool)})
    first, peer, probe = samples[next(iter(runs))], samples["sdpa"].median, samples["probe"].median
    results = []
    for name, form in case.forms.items():
        ours = samples[name].median
        result: dict[str, float | str] = {
            "case": case.name,
            "cache": name,
            "ms": 1e3 * ours,
            f"llmc {case.unit}": form.work / ours / 1e9,
            "spread %": 100 * samples[name].spread,
            "× sdpa": peer / ours,
            f"× {next(iter(runs))}": first.paired_ratio(samples[name]),
        }
        if case.unit == "GB/s":
            result["% of probe"] = 100 * (form.work / ours) / (_PROBE_BYTES / probe)
        results.append(result)
    return results


_PROBE_BYTES = 1 << 28


def _ours(layers: tuple[PagedBatch, ...], target: CpuTarget, pool: ctypes.c_void_p) -> Callable[[], float]:
    outputs = [torch.empty(layer.q.shape[0], HEADS * HEAD_DIM, dtype=layer.q.dtype) for layer in layers]
    pairs = zip(layers, outputs, strict=True)
    calls = [kernel_call(target, "paged_attention", layer.dtypes, layer.values(y)) for layer, y in pairs]

    # A call holds addresses only: the results that it writes have to live as long.
    def run(_: object = outputs) -> float:
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
