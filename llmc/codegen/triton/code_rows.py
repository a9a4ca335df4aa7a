"""Put quantized weights' codes into the rows that GPU kernels read: a byte a code, or two codes of 4 bits in a byte.

In CODE_PAIR_ROWS channel 32·i + j of a row is in the low half of byte 16·i + j, and channel 32·i + 16 + j in its high
half: what a thread reads of x beside 16 bytes of codes are two runs of 16 channels. int4 codes are stored plus 8.
Rows end at multiples of 16 bytes, so that each starts at one; what fills them up is multiplied by zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.program import Layout

ROW_ALIGNMENT = 16
_PAIR_RUN = 32


def row_bytes(columns: int, layout: Layout) -> int:
    """Bytes of a row of that many codes in CODE_ROWS or CODE_PAIR_ROWS."""
    if layout is Layout.CODE_ROWS:
        return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return -(-columns // _PAIR_RUN) * _PAIR_RUN // 2


def code_rows(codes: Tensor, layout: Layout) -> Tensor:
    """codes: [out, in], int8 or uint8, as in llmc/ops/weight_codes.py, in the layout, 1-D, of their dtype or uint8."""
    out, columns = codes.shape
    if layout is Layout.CODE_ROWS:
        return torch.nn.functional.pad(codes, (0, -columns % ROW_ALIGNMENT)).reshape(-1).contiguous()
    unsigned = codes if codes.dtype is torch.uint8 else (codes + 8).view(torch.uint8)
    runs = torch.nn.functional.pad(unsigned, (0, -columns % _PAIR_RUN)).view(out, -1, 2, _PAIR_RUN // 2)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).reshape(-1).contiguous()
