"""Quantized weights: codes, scales and zeros, what they stand for, and how weights are rounded to them.

A weight [out, in] is stored as codes [out, in], scales [out, groups] and, if asymmetric, zeros [out, groups]. The
columns fall into `groups` runs of equal length; one group is a scale per row. A scale shared by more than one row (per
tensor, per block) is repeated in each, so that rows are independent and weights of one format can be stacked.

    format   codes                       value
    int8     int8, -128 … 127            (code - zero) · scale
    int6     int8, -32 … 31              (code - zero) · scale
    int5     int8, -16 … 15              (code - zero) · scale
    int4     int8, -8 … 7                (code - zero) · scale
    fp8      uint8, bits of e4m3fn       e4m3(code) · scale
    nf4      uint8, 0 … 15               NF4[code] · scale
    mxfp4    uint8, bits of e2m1         E2M1[code] · scale, the scale a power of two
    iq4_*    uint8, 0 … 15               IQ4[code] · scale
    q*_*     int8, as GGUF files         code · scale - minimum
             have them

Where a format has steps, a float is shared by a run of groups: scales are [out, runs], multiplied by scale_steps, int8
[out, groups]. Minima, [out, runs], are multiplied by minimum_steps in the same way. A format without steps may also
have minima; then runs are groups. formats/code_format.py has the properties of each format, docs/quantization.md the
reasons.
"""

import math

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS, RUN_UNIT
from llmc.graph.code_numbers import code_dtype, in_steps, per_column, weight_values
from llmc.graph.op_record import Part
from llmc.ops.registry import FROM_CAPTURED, IN_NO_GRAPH, op, per_element


# Flops: what it takes to decode is in the rates that are measured of products.
@op(
    fake=lambda a: a.codes.new_empty(a.codes.shape, dtype=a.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=CODE_PARTS,
    part=Part.STORAGE,
    axes="codes[o g*s*i] scales[o g] zeros[o g] scale_steps[o g*s] minima[o g] minimum_steps[o g*s] -> [o g*s*i]",
    # Kernels read this many columns at a time, a whole number of groups: padding on a rank then has scales of zero.
    least_part=lambda call: RUN_UNIT if CODE_FORMATS[call.arguments["format"]].is_blocked else 1,
)
def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    dtype: torch.dtype,
    scale_steps: Tensor | None = None,
    minima: Tensor | None = None,
    minimum_steps: Tensor | None = None,
) -> Tensor:
    """The weight [out, in] that codes stand for, rounded to dtype."""
    return weight_values(codes, scales, zeros, format, scale_steps, minima, minimum_steps).to(dtype)


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
    codes = CODE_FORMATS[format]
    if codes.integers is not None and not symmetric:
        smallest, largest = codes.integers
        scales = (high - low) / (largest - smallest)
    else:
        magnitude = torch.maximum(high, -low)
        if codes.power_of_two:
            # The one that brings the largest magnitude into the format's top binade.
            exponent = torch.floor(torch.log2(magnitude.clamp_min(2.0**-100))) - math.floor(math.log2(codes.largest))
            return torch.exp2(exponent.clamp(-126, 126)).to(dtype)
        scales = magnitude / codes.largest
    rounded = scales.to(dtype)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


@op(fake=lambda a: a.scales.new_empty(a.scales.shape, dtype=torch.int8), stages=IN_NO_GRAPH, flops=per_element(1))
def weight_zeros(weight: Tensor, scales: Tensor, format: str, rows: int) -> Tensor:
    """The code of zero, int8 [out, groups], that gives each group's minimum the least code, for asymmetric integers."""
    low, _ = _extent(weight, weight.shape[1] // scales.shape[1], rows)
    integers = CODE_FORMATS[format].integers
    assert integers is not None, f"{format} has no zeros"
    smallest, largest = integers
    return (smallest - torch.round(low / scales.float())).clamp(smallest, largest).to(torch.int8)


@op(
    fake=lambda a: a.weight.new_empty(a.weight.shape, dtype=code_dtype(a.format)),
    stages=IN_NO_GRAPH,
    flops=per_element(1),
)
def weight_codes(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    scale_steps: Tensor | None = None,
    minima: Tensor | None = None,
    minimum_steps: Tensor | None = None,
) -> Tensor:
    """The nearest codes [out, in] to a weight, given all other parts; beyond the range, the code at its end."""
    columns = weight.shape[1]
    shifted = weight.float()
    if minima is not None:
        shifted = shifted + per_column(in_steps(minima, minimum_steps), columns)
    scaled = shifted / per_column(in_steps(scales, scale_steps), columns)
    return nearest_codes(scaled, None if zeros is None else per_column(zeros, columns), format)


def nearest_codes(scaled: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """The codes nearest to values that are scaled already; zeros has their shape. Ties go to even codes."""
    codes = CODE_FORMATS[format]
    if codes.integers is not None:
        smallest, largest = codes.symmetric if zeros is None else codes.integers
        rounded = torch.round(scaled) if zeros is None else torch.round(scaled) + zeros
        return rounded.clamp(smallest, largest).to(torch.int8)
    if codes.table is None:
        return scaled.clamp(-codes.largest, codes.largest).to(torch.float8_e4m3fn).view(torch.uint8)
    if codes.power_of_two:
        return _e2m1_codes(scaled)
    levels = torch.tensor(codes.table, dtype=torch.float32, device=scaled.device)
    return torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


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
