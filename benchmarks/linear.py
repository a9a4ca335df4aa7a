"""The CPU matrix products beside torch's linear, in the shapes of Llama-3.2-1B.

    python -m benchmarks.linear [--threads 1 2] [--weights bf16] [--tokens 1 4 16 64 512] [--json]

--weights: f32 or bf16 (activations have the same type), or with bf16 activations w4a8, w8a8, int4, int5, int6, int8,
fp8, nf4 or mxfp4, with groups as by default; or w4a8:x32, q4_k, q5_k, q6_k or iq4_xs, whose tokens have a scale for
each 32 channels. torch multiplies plain weights of the activations' type.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter, sleep
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import Sample, alternate
from llmc.codegen.cpp.probes import multiply_rate, read_bandwidth
from llmc.formats.code_format import TOKEN_GROUP
from llmc.targets import host_target
from tests.codegen.cpp.kernel_calls import kernel_call, kernels, open_pool, pointer, rows
from tests.codegen.cpp.quantized_calls import quantized

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

    @property
    def out(self) -> int:
        """Columns of the result."""
        return self.weight_rows // 2 if self.kernel == "gated_linear" else self.weight_rows


SHAPES = (
    Shape("qkv", "linear", 2048, 3072, 16),
    Shape("o", "linear", 2048, 2048, 16),
    Shape("gate_up", "gated_linear", 2048, 16384, 16),
    Shape("down", "linear", 8192, 2048, 16),
    Shape("lm_head", "lm_head", 2048, 128256, 1),
)


@dataclass(frozen=True)
class Scheme:
    """Quantized weights. group: columns that share a scale; None for all of a row, or those of a blocked format.
    x_group: channels of a token that share a scale; None for all."""

    format: str
    x_format: str
    group: int | None
    scale_dtype: torch.dtype
    x_group: int | None = None


SCHEMES = {
    "w4a8": Scheme("int4", "int8", 128, torch.bfloat16),
    "w8a8": Scheme("int8", "int8", None, torch.float32),
    "int4": Scheme("int4", "none", 128, torch.bfloat16),
    "int5": Scheme("int5", "none", 128, torch.bfloat16),
    "int6": Scheme("int6", "none", 128, torch.bfloat16),
    "int8": Scheme("int8", "none", None, torch.float32),
    "fp8": Scheme("fp8", "none", None, torch.float32),
    "nf4": Scheme("nf4", "none", 64, torch.bfloat16),
    "mxfp4": Scheme("mxfp4", "none", 32, torch.bfloat16),
    "w4a8:x32": Scheme("int4", "int8", 128, torch.bfloat16, TOKEN_GROUP),
    "q4_k": Scheme("q4_k", "int8", None, torch.float16, TOKEN_GROUP),
    "q5_k": Scheme("q5_k", "int8", None, torch.float16, TOKEN_GROUP),
    "q6_k": Scheme("q6_k", "int8", None, torch.float16, TOKEN_GROUP),
    "iq4_xs": Scheme("iq4_xs", "int8", None, torch.float16, TOKEN_GROUP),
}


@dataclass(frozen=True)
class Roofline:
    """Bytes and operations per second, as measured."""

    bandwidth: float
    rate: float

    def seconds(self, nbytes: int, operations: int) -> float:
        return max(nbytes / self.bandwidth, operations / self.rate)


@dataclass(frozen=True)
class Calls:
    """Calls of a kernel, each on the next weight of a ring: [weights, …], kept here for the calls' pointers."""

    run: Callable[[], None]
    ring: Tensor

    @property
    def copies(self) -> int:
        """Weights in the ring."""
        return len(self.ring)

    @property
    def nbytes(self) -> int:
        """Of one weight."""
        return self.ring[0].nbytes


def main() -> None:
    arguments = parse_arguments()
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        target = host_target()
        for tokens in arguments.tokens:
            # Measured again each time: on a shared host the bandwidth changes by the minute.
            kind = multiplied_type(arguments.weights)
            roofline = Roofline(read_bandwidth(target, threads), multiply_rate(target, threads, kind))
            if not arguments.json:
                print(
                    f"{target.name}, {arguments.weights}, {threads} threads: "
                    f"{roofline.bandwidth / 1e9:.1f} GB/s, {roofline.rate / 1e9:.0f} G{kind} operations/s measured"
                )
            step = {"llmc": 0.0, "torch": 0.0, "bound": 0.0}
            for shape in SHAPES:
                # Only the last token of a prompt wants logits.
                heads = min(tokens, 64) if shape.kernel == "lm_head" else tokens
                result = measure(shape, heads, arguments.weights, threads, roofline)
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
    parser.add_argument("--weights", choices=[*DTYPES, *SCHEMES], default="bf16")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def multiplied_type(weights: str) -> Literal["f32", "bf16", "int8"]:
    """The probe of the fastest inner loop that could do the products."""
    if weights == "f32":
        return "f32"
    return "int8" if weights in SCHEMES and SCHEMES[weights].x_format == "int8" else "bf16"


def measure(shape: Shape, tokens: int, weights: str, threads: int, roofline: Roofline) -> dict[str, str | int | float]:
    """Median seconds a call, llmc's and torch's in turn, with the spread of the rounds."""
    torch.manual_seed(0)
    dtype = DTYPES.get(weights, torch.bfloat16)
    x = torch.randn(tokens, shape.channels).to(dtype)
    y = torch.empty(tokens, shape.out, dtype=torch.float32 if shape.kernel == "lm_head" else dtype)
    target = host_target()
    scratch = kernels(target).llmc_linear_scratch(tokens, shape.channels)
    with open_pool(target, threads, scratch) as pool:
        plain = plain_ring(shape, dtype)
        scheme = SCHEMES.get(weights)
        ours = plain_calls(shape, x, y, plain, pool) if scheme is None else quantized_calls(shape, x, y, scheme, pool)
        theirs = Calls(torch_run(x, plain), plain)
        samples = alternate(
            {
                name: timed(c.run, max(2, min(c.copies, 512 // tokens)))
                for name, c in {"llmc": ours, "torch": theirs}.items()
            }
        )
    operations = 2 * shape.channels * shape.weight_rows * tokens
    return row(shape, tokens, roofline.seconds(ours.nbytes, operations), ours.nbytes, operations, samples)


def plain_ring(shape: Shape, dtype: torch.dtype) -> Tensor:
    """The values do not matter for time, so one ring serves as panels and as rows."""
    size = shape.channels * shape.weight_rows
    copies = max(1, RING_BYTES // (size * dtype.itemsize))
    ring = huge_pages(copies * size * dtype.itemsize).view(dtype).view(copies, shape.weight_rows, shape.channels)
    return ring.copy_(torch.randn(shape.channels).to(dtype))


def huge_pages(nbytes: int) -> Tensor:
    """Memory in large pages, as a mapped file has in the page cache; with 4 KiB ones a product takes 10% longer."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def plain_calls(shape: Shape, x: Tensor, y: Tensor, ring: Tensor, pool: ctypes.c_void_p) -> Calls:
    values = common_values(shape, x, y)
    calls = [kernel_call(host_target(), shape.kernel, [x.dtype], values | {"weight": pointer(w)}) for w in ring]
    return Calls(in_turn(calls, pool), ring)


def quantized_calls(shape: Shape, x: Tensor, y: Tensor, scheme: Scheme, pool: ctypes.c_void_p) -> Calls:
    # A few rows' weights, repeated.
    weight = quantized(64, shape.channels, scheme.format, group=scheme.group, scale_dtype=scheme.scale_dtype)
    some = weight.packed()
    size = shape.weight_rows // 64 * some.nbytes
    copies = max(1, RING_BYTES // size)
    ring = huge_pages(copies * size).view(copies, -1, some.nbytes)
    ring.copy_(some)
    values = common_values(shape, x, y) | weight.fields() | {"group": weight.group, "x_format": scheme.x_format}
    values |= {"x_group": scheme.x_group or 0}
    family = f"quantized_{shape.kernel}"
    calls = [kernel_call(host_target(), family, [torch.bfloat16], values | {"weight": pointer(w)}) for w in ring]
    return Calls(in_turn(calls, pool), ring)


def common_values(shape: Shape, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Of all products."""
    activation = "silu" if shape.kernel == "gated_linear" else "identity"
    size = {"tokens": x.shape[0], "in": x.shape[1], "out": shape.out}
    return size | {"x": rows(x), "y": rows(y), "activation": activation, "scale": 1.0}


def in_turn(calls: Sequence[Callable[[ctypes.c_void_p], None]], pool: ctypes.c_void_p) -> Callable[[], None]:
    turn = count()
    return lambda: calls[next(turn) % len(calls)](pool)


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
    shape: Shape, tokens: int, bound: float, nbytes: int, operations: int, samples: dict[str, Sample]
) -> dict[str, str | int | float]:
    ours = samples["llmc"]
    return {
        "shape": shape.name,
        "tokens": tokens,
        "llmc": ours.median,
        "torch": samples["torch"].median,
        "bound": bound,
        "spread": ours.spread,
        "gigabytes_per_second": nbytes / ours.median / 1e9,
        "gigaops_per_second": operations / ours.median / 1e9,
    }


def print_row(result: dict[str, str | int | float]) -> None:
    ours, bound, peer = float(result["llmc"]), float(result["bound"]), float(result["torch"])
    print(
        f"  {result['tokens']:4} {result['shape']:8} {ours * 1e6:9.0f} us ±{float(result['spread']):4.0%}"
        f"  {float(result['gigabytes_per_second']):5.1f} GB/s  {float(result['gigaops_per_second']):5.0f} Gop/s"
        f"  {bound / ours:4.0%} of the bound;  torch {peer * 1e6:9.0f} us  {peer / ours:5.2f}x"
    )


if __name__ == "__main__":
    main()
