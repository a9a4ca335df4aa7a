"""llmc's kernels alone, as CUDA graphs of launches, against the libraries': products, attention, norms.

In an engine a kernel finds none of its data in the GPU's L2 cache, because a layer's weights and keys come between two
of its launches; so cases that are small run on several sets of arguments in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench_cudagraph

from benchmarks.gpu.measurement import Measurement, report
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernel_table import KERNELS
from llmc.errors import LlmcError
from llmc.targets import GpuTarget, device_target
from tests.codegen.triton.claimed import rounded
from tests.codegen.triton.quantized_weight import QuantizedWeight
from tests.codegen.triton.tensor_call import TensorCall

ROUNDS = 3
BLOCK_SIZE = 16
_LINEAR = torch.ops.llmc.linear.default
# So many times what the L2 cache holds is read before the same data is read again.
_CACHE_SIZES = 4


@dataclass
class Case:
    """One operation on given arguments. results: what shapes and dtypes come out. peers: by name.

    others: further arguments, alike, to be read in turn with the first; peers take turns with theirs by themselves.
    """

    group: str
    name: str
    op: Any
    arguments: tuple[Any, ...]
    results: Sequence[Tensor]
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    others: Sequence[tuple[Any, ...]] = ()
    bytes: float = 0.0
    flops: float = 0.0


def main() -> None:
    target = device_target()
    if target is None:
        sys.exit("there is no GPU that llmc knows")
    triton.set_allocator(scratch_memory)
    for make in (norms, products, quantized_products, decode_attention, prefill_attention):
        for case in make():
            try:
                measure(case, target)
            except (RuntimeError, LlmcError, ValueError) as error:
                print(f"{case.name}: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.empty_cache()


def scratch_memory(nbytes: int, alignment: int, stream: int | None) -> Tensor:
    """What kernels that make tensor descriptors ask Triton's launcher for."""
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def measure(case: Case, target: GpuTarget) -> None:
    """Every candidate of ours that serves the rows, and every peer; one that fails is told and left out."""
    template = KERNELS[case.op]
    sets = (case.arguments, *case.others)
    calls = [TensorCall(template, arguments, case.results, "cuda", in_place=False) for arguments in sets]
    runs = {**_candidates(template, calls, target), **case.peers}
    for name, run in runs.items():
        try:
            seconds = tuple(do_bench_cudagraph(run, return_mode="median") / 1e3 for _ in range(ROUNDS))
        except (RuntimeError, LlmcError) as error:
            print(f"{case.name}: {name} failed: {str(error).splitlines()[0]}", flush=True)
            continue
        report(Measurement(case.group, case.name, name, seconds, case.bytes, case.flops))


def _candidates(
    template: KernelTemplate, calls: Sequence[TensorCall], target: GpuTarget
) -> dict[str, Callable[[], object]]:
    """By name, each on the calls in turn: `llmc` is the one that is chosen without measuring, the others are numbered.

    The calls are of the same shapes, so their candidates are the same.
    """
    tokens, launches = calls[0].tokens, [template.candidates(call, target) for call in calls]
    serving = [
        index
        for index, launch in enumerate(launches[0])
        if launch.min_tokens <= tokens and (launch.max_tokens is None or tokens <= launch.max_tokens)
    ]
    return {
        f"llmc candidate {number}" if number else "llmc": in_turn(
            [
                partial(_run_all, call, (found[index], *found[index].then))
                for call, found in zip(calls, launches, strict=True)
            ]
        )
        for number, index in enumerate(serving)
    }


def _run_all(call: TensorCall, launches: Sequence[DeviceLaunch]) -> None:
    for launch in launches:
        call.run(launch)


def in_turn(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each call runs the next of them. A CUDA graph of many calls holds them all."""
    turns = cycle(runs)
    return lambda: next(turns)()


def sets_past_cache(bytes: float, l2_bytes: int) -> int:
    """How many sets of so many bytes there must be for none to be left in the L2 cache when its turn comes again."""
    return max(1, -(-_CACHE_SIZES * l2_bytes // int(bytes)))


def _l2_bytes() -> int:
    size: int = torch.cuda.get_device_properties(0).L2_cache_size
    return size


def norms() -> Iterator[Case]:
    """Residual and norm, which moves four matrices: two in, two out."""
    x, residual = (torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    op = torch.ops.llmc.add_rms_norm.default
    moved = 4.0 * x.nbytes
    target = torch.empty(2, *x.shape, device="cuda", dtype=x.dtype)
    source = torch.stack([x, residual])
    yield Case(
        "norm", "residual + RMSNorm 16384 × 4096", op, (x, residual, weight, 1e-5), (x, x),
        {"copy of the same bytes": lambda: target.copy_(source)}, bytes=moved,
    )  # fmt: skip


def products() -> Iterator[Case]:
    """The 8B model's largest product for decode and prefill."""
    for tokens, outputs, channels in ((1, 28672, 4096), (32, 28672, 4096), (512, 28672, 4096), (8192, 28672, 4096)):
        x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, channels, device="cuda", dtype=torch.bfloat16) / channels**0.5
        result = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        yield Case(
            "product", f"{tokens} × {channels} by {channels} × {outputs}", torch.ops.llmc.linear.default,
            (x, weight, None), (result,), {"cuBLAS": partial(torch.mm, x, weight.T, out=result)},
            bytes=float(x.nbytes + weight.nbytes + result.nbytes), flops=2.0 * tokens * outputs * channels,
        )  # fmt: skip


def quantized_products() -> Iterator[Case]:
    """The same product: one token with 4-bit weights against our bf16, a prompt in fp8 against cuBLAS bf16."""
    outputs, channels = 28672, 4096
    weight = torch.randn(outputs, channels, device="cuda", dtype=torch.bfloat16) / channels**0.5
    for tokens, format, group, x_format in ((1, "int4", 128, "none"), (1, "int8", channels, "none"),
                                            (512, "int4", 128, "none"), (8192, "fp8", channels, "fp8"),
                                            (8192, "int8", channels, "int8")):  # fmt: skip
        x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
        result = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        dtype = torch.float32 if group == channels else torch.bfloat16
        scales = torch.ops.llmc.weight_scales(weight, format, group, True, 1, dtype)
        codes = torch.ops.llmc.weight_codes(weight, scales, None, format)
        plain = TensorCall(KERNELS[_LINEAR], (x, weight, None), (result,), "cuda", in_place=False)
        target = device_target()
        assert target is not None
        peers: dict[str, Callable[[], object]] = {"cuBLAS bf16": partial(torch.mm, x, weight.T, out=result)}
        peers["our bf16"] = _candidates(KERNELS[_LINEAR], [plain], target)["llmc"]
        bits = 4 if format == "int4" else 8
        count = sets_past_cache(codes.numel() * bits // 8, _l2_bytes()) if tokens == 1 else 1
        copies = [codes, *(codes.clone() for _ in range(count - 1))]
        weights = [QuantizedWeight(each, scales, None, format).claimed() for each in copies]
        sets = [(rounded(x, x_format), each, None, x.dtype) for each in weights]
        yield Case(
            "quantized product", f"{tokens} × {channels} by {outputs}, {format} weights, {x_format} activations",
            _LINEAR, sets[0], (result,), peers, sets[1:],
            bytes=float(x.nbytes + codes.numel() * bits // 8 + scales.nbytes + result.nbytes),
            flops=2.0 * tokens * outputs * channels,
        )  # fmt: skip


def decode_attention() -> Iterator[Case]:
    """One query a request over the 8B model's cache."""
    for batch, context in ((1, 8192), (32, 1024), (32, 8192)):
        yield _attention(batch, context, queries=1)


def prefill_attention() -> Iterator[Case]:
    """A causal prompt of the 8B model."""
    for tokens in (512, 8192):
        yield _attention(1, tokens, queries=tokens)


def _attention(batch: int, context: int, queries: int, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Case:
    blocks = -(-context // BLOCK_SIZE)
    shape = (batch * blocks, kv_heads, BLOCK_SIZE, dim)
    q = torch.randn(batch * queries, heads, dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
    pairs = queries * (context - (queries - 1) / 2) * batch
    cache_bytes = 2.0 * batch * context * kv_heads * dim * q.itemsize
    count = sets_past_cache(cache_bytes, _l2_bytes()) if queries == 1 else 1
    first, *others = [
        (q, *(torch.randn(shape, device="cuda", dtype=q.dtype) for _ in range(2)), starts, lens, tables, dim**-0.5)
        for _ in range(count)
    ]
    # The peers get the same heads in whole tensors, [batch, heads, length, dim].
    q_whole = torch.randn(batch, heads, queries, dim, device="cuda", dtype=q.dtype)
    whole = [
        [torch.randn(batch, kv_heads, context, dim, device="cuda", dtype=q.dtype) for _ in range(2)]
        for _ in range(count)
    ]

    def peer(backend: SDPBackend) -> Callable[[], object]:
        def run(k: Tensor, v: Tensor) -> object:
            chosen: AbstractContextManager[None] = sdpa_kernel(backend)
            with chosen:
                return torch.nn.functional.scaled_dot_product_attention(
                    q_whole, k, v, is_causal=queries > 1, enable_gqa=True
                )

        return in_turn([partial(run, *cache) for cache in whole])

    name = f"prefill {queries}" if queries > 1 else f"decode, batch {batch}, context {context}"
    return Case(
        "attention", f"{name}, {heads}/{kv_heads} heads of {dim}", torch.ops.llmc.paged_attention.default,
        first, (q,),
        {"SDPA flash": peer(SDPBackend.FLASH_ATTENTION), "SDPA cuDNN": peer(SDPBackend.CUDNN_ATTENTION)},
        others, bytes=cache_bytes + 2.0 * q.nbytes, flops=4.0 * pairs * heads * dim,
    )  # fmt: skip


if __name__ == "__main__":
    main()
