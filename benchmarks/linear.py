"""The CPU matrix products beside torch's linear, in the shapes of Llama-3.2-1B.

    python -m benchmarks.linear [--threads 1 2] [--dtype bf16] [--tokens 1 4 16 64 512] [--json]

Each product runs on a ring of weights larger than the caches, as in a model. The bound of a product is the larger of
its weights' bytes over the read bandwidth and its operations over the rate of the inner loop in cache, both measured
in the same run; the share is that bound over the time. torch's figure for gate_up is of the product alone, ours is of
the product with SiLU and the gate.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter, sleep

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import Sample, alternate
from llmc.codegen.cpp.probes import multiply_rate, read_bandwidth
from llmc.ops.activation import ACTIVATIONS
from llmc.targets import host_target
from tests.codegen.cpp.linear_calls import Linear, kernels, open_pool, rows

RING_BYTES = 256 << 20
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """A product of the model: `weight_rows` × `channels` weights, `calls` of them in a step."""

    name: str
    kernel: str
    channels: int
    weight_rows: int
    calls: int


SHAPES = (
    Shape("qkv", "linear", 2048, 3072, 16),
    Shape("o", "linear", 2048, 2048, 16),
    Shape("gate_up", "gated_linear", 2048, 16384, 16),
    Shape("down", "linear", 8192, 2048, 16),
    Shape("lm_head", "lm_head", 2048, 128256, 1),
)


@dataclass(frozen=True)
class Roofline:
    """Bytes and floating-point operations per second, as measured."""

    bandwidth: float
    rate: float

    def seconds(self, weight: Tensor, tokens: int) -> float:
        return max(weight.nbytes / self.bandwidth, 2 * weight.numel() * tokens / self.rate)


def main() -> None:
    arguments = parse_arguments()
    dtype = DTYPES[arguments.dtype]
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        target = host_target()
        for tokens in arguments.tokens:
            # Measured again each time: on a shared host the bandwidth changes by the minute.
            roofline = Roofline(read_bandwidth(target, threads), multiply_rate(target, threads, arguments.dtype))
            if not arguments.json:
                print(
                    f"{target.name}, {arguments.dtype}, {threads} threads: "
                    f"{roofline.bandwidth / 1e9:.1f} GB/s, {roofline.rate / 1e9:.0f} GFLOP/s measured"
                )
            step = {"llmc": 0.0, "torch": 0.0, "bound": 0.0}
            for shape in SHAPES:
                # Only the last token of a prompt wants logits.
                heads = min(tokens, 64) if shape.kernel == "lm_head" else tokens
                result = measure(shape, heads, dtype, threads, roofline)
                results.append({"threads": threads} | result)
                for name in step:
                    step[name] += shape.calls * float(result[name])
                if not arguments.json:
                    print_row(result)
            if not arguments.json:
                print(
                    f"  {tokens:4} tokens, all products of a step: llmc {step['llmc'] * 1e3:.1f} ms "
                    f"({step['bound'] / step['llmc']:.0%} of the bound), torch {step['torch'] * 1e3:.1f} ms"
                )
    if arguments.json:
        print(json.dumps(results, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(
    shape: Shape, tokens: int, dtype: torch.dtype, threads: int, roofline: Roofline
) -> dict[str, str | int | float]:
    """Median seconds a call, llmc's and torch's in turn, with the spread of the rounds."""
    torch.manual_seed(0)
    x = torch.randn(tokens, shape.channels).to(dtype)
    size = shape.channels * shape.weight_rows
    copies = max(1, RING_BYTES // (size * dtype.itemsize))
    # The values do not matter for time, so one ring serves both: as panels and as rows.
    weights = huge_pages(copies * size, dtype).view(copies, shape.weight_rows, shape.channels)
    weights.copy_(torch.randn(shape.channels).to(dtype))
    target = host_target()
    scratch = kernels(target).llmc_linear_scratch(tokens, shape.channels)
    with open_pool(target, threads, scratch) as pool:
        runs = {"llmc": llmc_run(shape, x, weights, pool), "torch": torch_run(x, weights)}
        samples = alternate({name: timed(run, max(2, min(copies, 512 // tokens))) for name, run in runs.items()})
    return row(shape, tokens, roofline.seconds(weights[0], tokens), weights[0], samples)


def huge_pages(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory in large pages, as a mapped file has in the page cache; with 4 KiB ones a product takes 10% longer."""
    memory = mmap.mmap(-1, elements * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def llmc_run(shape: Shape, x: Tensor, weights: Tensor, pool: ctypes.c_void_p) -> Callable[[], None]:
    out = shape.weight_rows // 2 if shape.kernel == "gated_linear" else shape.weight_rows
    y = torch.empty(x.shape[0], out, dtype=torch.float32 if shape.kernel == "lm_head" else x.dtype)
    activation = list(ACTIVATIONS).index("silu" if shape.kernel == "gated_linear" else "identity")
    function = getattr(kernels(host_target()), f"llmc_{shape.kernel}_{'f32' if x.dtype == torch.float32 else 'bf16'}")
    calls = [
        Linear(*x.shape, out, rows(x), weight.data_ptr(), None, rows(None), rows(y), activation, 1.0)
        for weight in weights
    ]
    turn = count()
    # y is kept alive by the closure.
    return lambda: function(pool, ctypes.byref(calls[next(turn) % len(calls)]), y.shape[0])


def torch_run(x: Tensor, weights: Tensor) -> Callable[[], None]:
    turn = count()

    def run() -> None:
        functional.linear(x, weights[next(turn) % len(weights)])

    return run


def timed(run: Callable[[], None], repeats: int) -> Callable[[], float]:
    """Seconds a call, over `repeats` calls; after a pause in which the other's threads stop spinning, and one call."""

    def measured() -> float:
        sleep(0.03)
        run()
        start = perf_counter()
        for _ in range(repeats):
            run()
        return (perf_counter() - start) / repeats

    return measured


def row(
    shape: Shape, tokens: int, bound: float, weight: Tensor, samples: dict[str, Sample]
) -> dict[str, str | int | float]:
    ours = samples["llmc"]
    return {
        "shape": shape.name,
        "tokens": tokens,
        "llmc": ours.median,
        "torch": samples["torch"].median,
        "bound": bound,
        "spread": ours.spread,
        "gigabytes_per_second": weight.nbytes / ours.median / 1e9,
        "gigaflops_per_second": 2 * weight.numel() * tokens / ours.median / 1e9,
    }


def print_row(result: dict[str, str | int | float]) -> None:
    ours, bound, peer = float(result["llmc"]), float(result["bound"]), float(result["torch"])
    print(
        f"  {result['tokens']:4} {result['shape']:8} {ours * 1e6:9.0f} us ±{float(result['spread']):4.0%}"
        f"  {float(result['gigabytes_per_second']):5.1f} GB/s  {float(result['gigaflops_per_second']):5.0f} GFLOP/s"
        f"  {bound / ours:4.0%} of the bound;  torch {peer * 1e6:9.0f} us  {peer / ours:5.2f}x"
    )


if __name__ == "__main__":
    main()
