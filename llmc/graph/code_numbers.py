"""Codes as tensors: their dtype, and the numbers that they stand for."""

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS


def code_dtype(format: str) -> torch.dtype:
    """int8 for integers, uint8 for bits of anything else."""
    return torch.uint8 if CODE_FORMATS[format].integers is None else torch.int8


def code_numbers(codes: Tensor, format: str) -> Tensor:
    """What codes stand for before zeros and scales, fp32."""
    table = CODE_FORMATS[format].table
    if table is not None:
        return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.float() if codes.dtype is torch.int8 else codes.view(torch.float8_e4m3fn).float()
