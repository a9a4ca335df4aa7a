"""Measure what graph/predict.py wants to know of this machine, with the engine's own kernels on made-up operands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from llmc.codegen.cpp.probes import multiply_rate, product_seconds, read_bandwidth, region_seconds
from llmc.graph.predict import Rates
from llmc.targets import CpuTarget

_CHANNELS = 2048
# A product in which transfer and arithmetic take about as long shows how much of one hides the other; the weights are
# more than caches hold.
_BALANCED_TOKENS, _BALANCED_ROWS = 16, 24576
# A product with a single panel of weights is almost only packing.
_PACKED_TOKENS, _PACKED_ROWS = 512, 32


def measured_rates(
    target: CpuTarget, threads: int, dtype: Literal["F32", "BF16"], *, cache_dir: Path | None = None
) -> Rates:
    """The rates of `threads` threads for products of that dtype; about 0.5 s.

    target: one that this machine can run. Raises ToolchainError without a compiler, LlmcError when the threads cannot
    be started.
    """
    suffix: Literal["f32", "bf16"] = "f32" if dtype == "F32" else "bf16"
    bandwidth = read_bandwidth(target, threads, cache_dir=cache_dir)
    multiply = {"F32": multiply_rate(target, threads, "f32", cache_dir=cache_dir)}
    if dtype == "BF16":
        multiply["BF16"] = multiply_rate(target, threads, "bf16", cache_dir=cache_dir)
    rate = multiply[dtype]

    def product(tokens: int, rows: int) -> float:
        return product_seconds(
            target, threads, suffix, tokens=tokens, channels=_CHANNELS, rows=rows, cache_dir=cache_dir
        )

    # One panel is one thread's work.
    alone = 2 * _PACKED_TOKENS * _CHANNELS * _PACKED_ROWS / (rate / threads)
    packing = product(_PACKED_TOKENS, _PACKED_ROWS) - alone
    pack = _PACKED_TOKENS * _CHANNELS / max(packing, 1e-6)

    weights = _CHANNELS * _BALANCED_ROWS
    shorter, longer = sorted(
        (weights * {"F32": 4, "BF16": 2}[dtype] / bandwidth, 2 * weights * _BALANCED_TOKENS / rate)
    )
    rest = product(_BALANCED_TOKENS, _BALANCED_ROWS) - _BALANCED_TOKENS * _CHANNELS / pack - longer
    serial = min(max(rest / shorter, 0.0), 1.0)
    launch = region_seconds(target, threads, cache_dir=cache_dir)
    return Rates(bandwidth, multiply, pack, launch, serial, measured=True)
