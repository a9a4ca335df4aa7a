"""Random parts of weights in blocked formats, as the ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.code_numbers import code_dtype

BLOCKED = [name for name, format in CODE_FORMATS.items() if format.is_blocked]


def blocked_parts(
    format: str,
    out: int,
    channels: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """By the names of llmc::dequantize's arguments, each over its whole range; weights of size 1 / sqrt(channels)."""
    record = CODE_FORMATS[format]
    run = record.run_of(channels)
    assert record.group is not None and run is not None
    runs, groups = channels // run, channels // record.group
    low, high = record.integers or (0, 15)
    steps = record.steps
    size = 1 / (record.largest * channels**0.5 * (1.0 if steps is None else 2.0 ** (steps.bits - 2)))

    def integers(least: int, count: int, columns: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(least, least + count, (out, columns), dtype=dtype, generator=generator)

    def floats() -> Tensor:
        return torch.randn(out, runs, generator=generator).mul(size).to(scale_dtype)

    parts = {"codes": integers(low, high - low + 1, channels, code_dtype(format)), "scales": floats()}
    if steps is not None:
        parts["scale_steps"] = integers(steps.least, 1 << steps.bits, groups)
    if record.has_minimum:
        parts["minima"] = floats()
        if steps is not None:
            parts["minimum_steps"] = integers(0, 1 << steps.bits, groups)
    return parts
