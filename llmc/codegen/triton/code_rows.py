"""Put quantized weights' codes into the rows that GPU kernels read: a byte a code, or two codes of 4 bits in a byte.

In CODE_PAIR_ROWS channel 32·i + j of a row is in the low half of byte 16·i + j, and channel 32·i + 16 + j in its high
half: what a thread reads of x beside 16 bytes of codes are two runs of 16 channels. Integer codes are stored without
sign, plus half of their range. Of 5 and 6 bits the low four lie so. Behind those of a row is what is above them, of
each 32 channels 4 or 8 bytes: the j-th has the bits of those halves that lie in bytes j, j + 4 or j + 8, …, low halves
first, so that a thread's 16 bytes find theirs in one short run. Rows end at multiples of 16 bytes, so that each starts
at one; what fills them up is multiplied by zeros.
"""

import torch
from torch import Tensor

from llmc.program import Layout

ROW_ALIGNMENT = 16
_PAIR_RUN = 32


def row_bytes(columns: int, layout: Layout) -> int:
    """Bytes of a row of that many codes, row-major in a layout."""
    stored = columns if layout is Layout.CODE_ROWS else -(-columns // _PAIR_RUN) * _PAIR_RUN * _bits(layout) // 8
    return -(-stored // ROW_ALIGNMENT) * ROW_ALIGNMENT


def code_rows(codes: Tensor, layout: Layout) -> Tensor:
    """codes: [out, in], int8 or uint8, as in llmc/ops/weight_codes.py, in the layout, 1-D, of their dtype or uint8."""
    out, columns = codes.shape
    if layout is Layout.CODE_ROWS:
        return torch.nn.functional.pad(codes, (0, -columns % ROW_ALIGNMENT)).reshape(-1).contiguous()
    bits = _bits(layout)
    unsigned = codes if codes.dtype is torch.uint8 else (codes + (1 << (bits - 1))).view(torch.uint8)
    runs = torch.nn.functional.pad(unsigned, (0, -columns % _PAIR_RUN)).view(out, -1, 2, _PAIR_RUN // 2)
    low = runs & 15
    rows = (low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1)
    if bits > 4:
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=codes.device).view(2, -1, 1)
        above = ((runs >> 4).unflatten(-1, (shifts.shape[1], -1)) << shifts).sum((2, 3), dtype=torch.uint8)
        rows = torch.cat((rows, above.flatten(1)), dim=1)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % ROW_ALIGNMENT)).reshape(-1)


def _bits(layout: Layout) -> int:
    assert layout.code_bits is not None, f"{layout} has no rows of codes"
    return layout.code_bits
