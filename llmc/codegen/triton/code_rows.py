"""Put quantized weights' codes into the rows that GPU kernels read: one byte per code, or two 4-bit codes per byte.

Codes of 8 bits are stored as they are. Other codes are stored as bit planes: a plane of the low four bits (low two for
codes of fewer bits) and a plane of the remaining high bits. A plane of `b` bits takes 4·b bytes per 32 channels of a
row. Byte j holds the bits of the channels whose place among 16 is j, j + 4·b and so on: channels 32·i + place from bit
0 up, channels 32·i + 16 + place from bit 4 up. So in CODE_PAIR_ROWS channel 32·i + j is in the low half of byte
16·i + j, and channel 32·i + 16 + j in its high half. A thread that reads 16 bytes of codes therefore needs two runs of
16 channels of x, and finds the high bits in one short run. The planes of a row are consecutive. Integer codes are made
unsigned by adding half of their range; codes of blocked formats by subtracting the least code. Rows are padded to
multiples of 16 bytes, so that each row is aligned; padding is multiplied by zeros.

STEP_ROWS are the steps of scales and minima, minus the least step: each group's scale step, then its minimum's step, in
their own number of bits, from the low bits of bytes up. Rows are padded to whole bytes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, STEP_PARTS
from llmc.program import Layout

ROW_ALIGNMENT = 16
_PAIR_RUN = 32


def row_bytes(columns: int, layout: Layout) -> int:
    """Bytes of a row of that many codes, row-major in a layout."""
    stored = columns if layout is Layout.CODE_ROWS else -(-columns // _PAIR_RUN) * _PAIR_RUN * _bits(layout) // 8
    return -(-stored // ROW_ALIGNMENT) * ROW_ALIGNMENT


def code_rows(codes: Tensor, layout: Layout) -> Tensor:
    """Pack codes in a layout, as a 1-D tensor of their dtype or uint8.

    codes: [out, in], int8 or uint8, as in llmc/ops/weight_codes.py.
    """
    if layout is Layout.CODE_ROWS:
        return torch.nn.functional.pad(codes, (0, -codes.shape[1] % ROW_ALIGNMENT)).reshape(-1).contiguous()
    bits = _bits(layout)
    return _planes(codes if codes.dtype is torch.uint8 else (codes + (1 << (bits - 1))).view(torch.uint8), bits)


def blocked_rows(parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
    """Pack a blocked format's codes [out, in], or its steps [out, groups] for STEP_ROWS, into 1-D uint8."""
    record = CODE_FORMATS[format]
    if layout is not Layout.STEP_ROWS:
        return _planes((parts["codes"] + record.unsigned_shift).view(torch.uint8), record.bits)
    steps = record.steps
    assert steps is not None, f"{format} has no steps"
    least = {"scale_steps": steps.least, "minimum_steps": 0}
    fields = torch.stack([parts[name].int() - least[name] for name in STEP_PARTS if name in parts], -1).flatten(1)
    places = torch.arange(8, device=fields.device)
    bits = ((fields[..., None] >> places[: steps.bits]) & 1).flatten(1)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    packed: Tensor = (bits.view(len(fields), -1, 8) << places).sum(-1).to(torch.uint8)
    return packed.reshape(-1)


def _planes(unsigned: Tensor, bits: int) -> Tensor:
    """Packed rows of uint8 codes [out, in] that take this many bits each."""
    out, columns = unsigned.shape
    runs = torch.nn.functional.pad(unsigned, (0, -columns % _PAIR_RUN)).view(out, -1, 2, _PAIR_RUN // 2)
    low = 4 if bits >= 4 else 2
    planes = [_plane(runs, low), *([_plane(runs >> low, bits - low)] if bits > low else [])]
    rows = torch.cat(planes, dim=1)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % ROW_ALIGNMENT)).reshape(-1)


def _plane(runs: Tensor, bits: int) -> Tensor:
    """Bytes [out, …] of the low bits of codes [out, runs, 2, 16]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=runs.device).view(2, -1, 1)
    fields = (runs & ((1 << bits) - 1)).unflatten(-1, (shifts.shape[1], -1))
    packed: Tensor = (fields << shifts).sum((2, 3), dtype=torch.uint8)
    return packed.flatten(1)


def _bits(layout: Layout) -> int:
    assert layout.code_bits is not None, f"{layout} has no rows of codes"
    return layout.code_bits
