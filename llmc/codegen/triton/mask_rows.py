"""Sparse weights as GPU kernels read them: masks and nonzero elements, both by row.

A weight is stored as three. MASK_ROWS: the bytes of each row's masks (llmc/ops/sparse_weight.py). MASK_STARTS: the
offset of each row's first element. The elements are stored as in the op. The offsets cost 64 bits per row.
"""

import torch
from torch import Tensor

from llmc.program import Layout

_START_BYTES, _WORD_BYTES = 8, 8


def mask_nbytes(shape: tuple[int, ...], layout: Layout) -> int:
    """Size of masks [out, words] in one of the two layouts, in bytes."""
    return shape[0] * (_START_BYTES if layout is Layout.MASK_STARTS else shape[1] * _WORD_BYTES)


def mask_rows(masks: Tensor, layout: Layout) -> Tensor:
    """Masks [out, words], int64, in one of the two layouts: uint8, or int64; 1-D."""
    of_bytes = masks.contiguous().view(torch.uint8)
    if layout is Layout.MASK_ROWS:
        return of_bytes.reshape(-1)
    ends = (
        torch.bitwise_and(of_bytes[..., None] >> torch.arange(8, dtype=torch.uint8, device=masks.device), 1)
        .sum((1, 2))
        .cumsum(0)
    )
    return torch.cat((ends.new_zeros(1), ends))[:-1].contiguous()
