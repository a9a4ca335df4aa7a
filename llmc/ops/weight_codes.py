"""Quantized weights: codes, scales and zeros, what they stand for, and how weights are rounded to them.

A weight [out, in] is stored as codes [out, in], scales [out, groups] and, if asymmetric, zeros [out, groups]. The
columns fall into `groups` runs of equal length; one group is a scale per row. A scale shared by more than one row (per
tensor, per block) is repeated in each, so that rows stand alone and weights of one format can be stacked.

    format   codes                       value
    int8     int8, -128 … 127            (code - zero) · scale
    int4     int8, -8 … 7                (code - zero) · scale
    fp8      uint8, bits of e4m3fn       e4m3(code) · scale
    nf4      uint8, 0 … 15               NF4[code] · scale
    mxfp4    uint8, bits of e2m1         E2M1[code] · scale, the scale a power of two
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, IN_NO_GRAPH, op, per_element

# Quantiles of a normal distribution scaled to [-1, 1]. Source: Dettmers et al. 2023, "QLoRA", appendix E.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Source: Open Compute Project, "Microscaling formats (MX) specification" 1.0.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_MAX = 448.0

CODE_DTYPES = {
    "int8": torch.int8,
    "int4": torch.int8,
    "fp8": torch.uint8,
    "nf4": torch.uint8,
    "mxfp4": torch.uint8,
}
# The smallest and the largest integer code.
CODE_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}
CODE_BITS = {"int8": 8, "int4": 4, "fp8": 8, "nf4": 4, "mxfp4": 4}


def code_values(codes: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """What codes stand for before they are scaled, fp32. zeros: [out, groups] or None."""
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if format in ("nf4", "mxfp4"):
        table = torch.tensor(NF4 if format == "nf4" else E2M1, dtype=torch.float32, device=codes.device)
        return table[codes.int()]
    values = codes.float()
    return values if zeros is None else values - _per_column(zeros, codes.shape[1])


def weight_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """The weight [out, in] in fp32."""
    return code_values(codes, zeros, format) * _per_column(scales, codes.shape[1])


def _per_column(values: Tensor, columns: int) -> Tensor:
    """[rows, groups] → [rows, columns], fp32."""
    return values.float().repeat_interleave(columns // values.shape[1], dim=1)


@op(fake=lambda a: a.codes.new_empty(a.codes.shape, dtype=a.dtype), stages=FROM_CAPTURED, flops=per_element(1))
def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that codes stand for, rounded to dtype."""
    return weight_values(codes, scales, zeros, format).to(dtype)


@op(
    fake=lambda a: a.weight.new_empty((a.weight.shape[0], a.weight.shape[1] // a.group), dtype=a.dtype),
    stages=IN_NO_GRAPH,
    flops=per_element(1),
)
def weight_scales(weight: Tensor, format: str, group: int, symmetric: bool, rows: int, dtype: torch.dtype) -> Tensor:
    """The scales [out, in / group] that just cover a weight [out, in], in dtype.

    group: columns that share a scale. rows: rows that share it: 1, a block's, or all of them.
    symmetric: the largest magnitude gets the largest code; otherwise the range from minimum to maximum is covered,
    zero always included.
    """
    low, high = _extent(weight, group, rows)
    if format in CODE_RANGE and not symmetric:
        smallest, largest = CODE_RANGE[format]
        scales = (high - low) / (largest - smallest)
    else:
        magnitude = torch.maximum(high, -low)
        if format == "mxfp4":
            # The power of two that brings the largest magnitude into e2m1's top binade.
            exponent = torch.floor(torch.log2(magnitude.clamp_min(2.0**-100))) - 2
            return torch.exp2(exponent.clamp(-126, 126)).to(dtype)
        scales = magnitude / {"int8": 127.0, "int4": 7.5, "fp8": FP8_MAX, "nf4": 1.0}[format]
    rounded = scales.to(dtype)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


@op(fake=lambda a: a.scales.new_empty(a.scales.shape, dtype=torch.int8), stages=IN_NO_GRAPH, flops=per_element(1))
def weight_zeros(weight: Tensor, scales: Tensor, format: str, rows: int) -> Tensor:
    """The code of zero, int8 [out, groups], that gives each group's minimum the least code: of asymmetric integers."""
    low, _ = _extent(weight, weight.shape[1] // scales.shape[1], rows)
    smallest, largest = CODE_RANGE[format]
    return (smallest - torch.round(low / scales.float())).clamp(smallest, largest).to(torch.int8)


@op(
    fake=lambda a: a.weight.new_empty(a.weight.shape, dtype=CODE_DTYPES[a.format]),
    stages=IN_NO_GRAPH,
    flops=per_element(1),
)
def weight_codes(weight: Tensor, scales: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """The nearest codes [out, in] to a weight, given scales and zeros; beyond the range, the code at its end."""
    scaled = weight.float() / _per_column(scales, weight.shape[1])
    return nearest_codes(scaled, None if zeros is None else _per_column(zeros, weight.shape[1]), format)


def nearest_codes(scaled: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """The codes nearest to values that are scaled already; zeros has their shape. Ties go to even codes."""
    if format == "fp8":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if format == "nf4":
        levels = torch.tensor(NF4, dtype=torch.float32, device=scaled.device)
        return torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    if format == "mxfp4":
        return _e2m1_codes(scaled)
    smallest, largest = CODE_RANGE[format]
    rounded = torch.round(scaled) if zeros is None else torch.round(scaled) + zeros
    return rounded.clamp(-largest if format == "int8" and zeros is None else smallest, largest).to(torch.int8)


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """Round to nearest, ties to the even mantissa, as the format asks."""
    magnitude = scaled.abs()
    ends = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float32, device=scaled.device)
    below = torch.bucketize(magnitude, ends)
    above = torch.bucketize(magnitude, ends, right=True)
    codes = torch.where(below % 2 == 0, below, above)
    return (codes + torch.where(scaled < 0, 8, 0)).to(torch.uint8)


def _extent(weight: Tensor, group: int, rows: int) -> tuple[Tensor, Tensor]:
    """The least and the largest element, or zero, of each group of columns: [out, groups], shared by `rows` rows."""
    count = weight.shape[0]
    grouped = weight.float().reshape(count, -1, group)
    low, high = grouped.amin(-1).clamp_max(0.0), grouped.amax(-1).clamp_min(0.0)
    if rows == 1:
        return low, high
    starts = range(0, count, rows)
    low = torch.cat([low[i : i + rows].amin(0, keepdim=True).expand(min(rows, count - i), -1) for i in starts])
    high = torch.cat([high[i : i + rows].amax(0, keepdim=True).expand(min(rows, count - i), -1) for i in starts])
    return low, high
