"""Measure what graph/predict.py wants to know of this machine, with the engine's own kernels on made-up operands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from llmc.codegen.cpp.probes import MAX_CHANNELS, MAX_TOKENS, Memory, Suffix, open_probes
from llmc.graph.predict import Rates
from llmc.program import ITEMSIZES
from llmc.targets import CpuTarget

# More than caches hold.
_MEMORY_BYTES = 128 << 20
_MULTIPLY_REPEATS = 300
# A product in which transfer and arithmetic take about as long shows how much of one hides the other.
_BALANCED_TOKENS = 16
# A product with a single panel of weights is almost only packing, and that panel is one thread's work.
_PANEL_ROWS = 32


def measured_rates(
    target: CpuTarget, threads: int, dtype: Literal["F32", "BF16"], *, cache_dir: Path | None = None
) -> Rates:
    """The rates of `threads` threads for products of that dtype; about 0.2 s.

    target: one that this machine can run. Raises ToolchainError without a compiler, LlmcError when the threads cannot
    be started.
    """
    suffix: Suffix = "f32" if dtype == "F32" else "bf16"
    with open_probes(target, threads, cache_dir) as probes, Memory(_MEMORY_BYTES) as weight:
        bandwidth = probes.read_bandwidth(weight)
        multiply = {"F32": probes.multiply_rate("f32", _MULTIPLY_REPEATS)}
        if dtype == "BF16":
            multiply["BF16"] = probes.multiply_rate("bf16", _MULTIPLY_REPEATS)
        rate, elements = multiply[dtype], MAX_TOKENS * MAX_CHANNELS
        alone = 2 * elements * _PANEL_ROWS / (rate / threads)
        packed = probes.product_seconds(suffix, weight, tokens=MAX_TOKENS, channels=MAX_CHANNELS, rows=_PANEL_ROWS)
        pack = elements / max(packed - alone, 1e-6)
        rows = weight.nbytes // (MAX_CHANNELS * ITEMSIZES[dtype])
        product = probes.product_seconds(suffix, weight, tokens=_BALANCED_TOKENS, channels=MAX_CHANNELS, rows=rows)
        launch = probes.region_seconds()
    operations = 2 * _BALANCED_TOKENS * MAX_CHANNELS * rows
    shorter, longer = sorted((weight.nbytes / bandwidth, operations / rate))
    rest = product - _BALANCED_TOKENS * MAX_CHANNELS / pack - longer
    return Rates(bandwidth, multiply, pack, launch, min(max(rest / shorter, 0.0), 1.0), measured=True)
