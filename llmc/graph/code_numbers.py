"""Codes as tensors: their dtype, and the numbers that they stand for (ops/weight_codes.py)."""

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS


def code_dtype(format: str) -> torch.dtype:
    """int8 for integers, uint8 for bits of anything else."""
    return torch.uint8 if CODE_FORMATS[format].integers is None else torch.int8


def code_numbers(codes: Tensor, format: str) -> Tensor:
    """The values of codes before zeros and scales are applied, fp32."""
    record = CODE_FORMATS[format]
    if record.table is not None:
        return torch.tensor(record.table, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.view(torch.float8_e4m3fn).float() if record.integers is None else codes.float()


def code_values(codes: Tensor, zeros: Tensor | None, format: str) -> Tensor:
    """The numbers that codes represent after zeros and before scales, in fp32. zeros: [out, groups] or None."""
    values = code_numbers(codes, format)
    return values if zeros is None else values - per_column(zeros, codes.shape[1])


def weight_values(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    scale_steps: Tensor | None = None,
    minima: Tensor | None = None,
    minimum_steps: Tensor | None = None,
) -> Tensor:
    """The weight [out, in] in fp32. Products with steps are exact there, and differences are rounded once."""
    values = code_values(codes, zeros, format) * per_column(in_steps(scales, scale_steps), codes.shape[1])
    return values if minima is None else values - per_column(in_steps(minima, minimum_steps), codes.shape[1])


def in_steps(floats: Tensor, steps: Tensor | None) -> Tensor:
    """Scales or minima of each group, fp32: floats [out, runs], times their steps [out, groups] if there are some."""
    return floats.float() if steps is None else per_column(floats, steps.shape[1]) * steps.float()


def per_column(values: Tensor, columns: int) -> Tensor:
    """[rows, groups] → [rows, columns], fp32."""
    return values.float().repeat_interleave(columns // values.shape[1], dim=1)
