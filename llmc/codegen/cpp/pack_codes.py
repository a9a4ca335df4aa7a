"""Put quantized weights into code panels (kernels/api.h): 32 output rows' scales, zeros and codes, group by group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.codegen.cpp.pack import padded_rows
from llmc.codegen.cpp.panel import PANEL
from llmc.errors import LoweringError
from llmc.formats.code_format import CODE_FORMATS
from llmc.program import Layout

# The layout in code panels of what a plain weight would have in panels.
_PLAIN = {Layout.CODE_PANELS: Layout.PANELS, Layout.GATED_CODE_PANELS: Layout.GATED_PANELS}
# Panels put together at a time, so that memory holds little beside the codes and the result.
_PANELS_AT_A_TIME = 64


@dataclass(frozen=True)
class CodeShape:
    """What a quantized weight's size depends on. shape: [out, in]; groups: of columns that share a scale."""

    shape: tuple[int, ...]
    groups: int
    format: str
    scale_dtype: torch.dtype
    has_zeros: bool

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.groups

    @property
    def words(self) -> int:
        """32-bit words of one row's codes of one group, the last one filled up."""
        format = CODE_FORMATS[self.format]
        # Planes hold whole runs of 32 codes.
        return -(-self.group // 32) * format.bits if format.in_planes else -(-self.group * format.bits // 32)

    @property
    def group_nbytes(self) -> int:
        """Bytes of one group of one panel."""
        return PANEL * (self.scale_dtype.itemsize + 2 * self.has_zeros + 4 * self.words)

    def nbytes(self, layout: Layout) -> int:
        """Bytes of `pack_codes`'s result. Raises LoweringError for a shape that the layout does not fit."""
        return padded_rows(self.shape, _PLAIN[layout]) // PANEL * self.groups * self.group_nbytes


def pack_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, layout: Layout) -> Tensor:
    """The weight in CODE_PANELS or GATED_CODE_PANELS, uint8, 1-D.

    codes: [out, in], scales: [out, groups], zeros: [out, groups] or None, as in llmc/ops/weight_codes.py;
    GATED_CODE_PANELS takes gate's rows followed by up's. Raises LoweringError for a shape that the layout does not fit.
    """
    shape = CodeShape(tuple(codes.shape), scales.shape[1], format, scales.dtype, zeros is not None)
    if shape.group * shape.groups != codes.shape[1]:
        raise LoweringError(f"{codes.shape[1]} columns cannot be cut into {shape.groups} equal groups")
    packed = torch.empty(shape.nbytes(layout), dtype=torch.uint8)
    panels = packed.view(-1, shape.groups, shape.group_nbytes)
    rows = panel_rows(codes.shape[0], layout, panels.shape[0])
    for first in range(0, panels.shape[0], _PANELS_AT_A_TIME):
        of_panels = rows[first : first + _PANELS_AT_A_TIME]
        _fill(panels[first : first + _PANELS_AT_A_TIME], of_panels, shape, codes, scales, zeros)
    return packed


def panel_rows(out: int, layout: Layout, panels: int) -> Tensor:
    """[panels, PANEL]: which row of the weight is whose lane; -1 for none."""
    parts = 1 if layout is Layout.CODE_PANELS else 2
    lanes, rows = PANEL // parts, out // parts
    of_part = torch.arange(panels * lanes).view(panels, lanes)
    return torch.cat([torch.where(of_part < rows, of_part + i * rows, -1) for i in range(parts)], dim=1)


def _fill(to: Tensor, rows: Tensor, shape: CodeShape, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """to: [panels, groups, group_nbytes]."""
    taken = rows.clamp_min(0)
    of_rows = torch.where(rows[..., None] >= 0, scales[taken], torch.zeros((), dtype=scales.dtype))
    start = _put(to, 0, of_rows.transpose(1, 2))
    shift = CODE_FORMATS[shape.format].unsigned_shift
    if zeros is not None:
        start = _put(to, start, (zeros[taken].to(torch.int16) + shift).transpose(1, 2))
    _put(to, start, panel_codes(rows, shape, codes))


def panel_codes(rows: Tensor, shape: CodeShape, codes: Tensor) -> Tensor:
    """The words [panels, groups, words, PANEL], int32, of the codes [out, in] of these rows. Codes of zero stand for no
    row, and fill up the last word."""
    shift = CODE_FORMATS[shape.format].unsigned_shift
    unsigned = codes[rows.clamp_min(0).flatten()].view(torch.uint8) + shift  # wraps around as it should
    of_rows = unsigned.view(*rows.shape, shape.groups, shape.group)
    of_rows = torch.where(rows[..., None, None] >= 0, of_rows, torch.tensor(shift, dtype=torch.uint8))
    return _words(of_rows, shape).permute(0, 2, 3, 1).contiguous()


def _put(to: Tensor, start: int, values: Tensor) -> int:
    """Write values: [panels, groups, …] from byte `start` of each group on; returns the byte after."""
    data = values.contiguous().view(torch.uint8).flatten(2)
    to[:, :, start : start + data.shape[2]] = data
    return start + data.shape[2]


def _words(codes: Tensor, shape: CodeShape) -> Tensor:
    """[panels, PANEL, groups, words], int32, of unsigned codes [panels, PANEL, groups, group]."""
    format = CODE_FORMATS[shape.format]
    missing = shape.words * 32 // format.bits - shape.group
    codes = torch.nn.functional.pad(codes, (0, missing), value=format.unsigned_shift)
    if format.bits == 8:
        return codes.contiguous().view(torch.int32)
    # Of each eight codes the first four in the low halves of four bytes, the others in the high ones.
    halves = (codes & 15).unflatten(-1, (-1, 2, 4))
    low: Tensor = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
    if format.in_planes:
        # Of each 32 codes: four words of low bits, then the bits above of every fourth code in a byte.
        more = format.bits - 4
        above = (codes >> 4).unflatten(-1, (-1, more, 8 // more, 4))
        bits = (above << torch.arange(0, 8, more, dtype=torch.uint8)[:, None]).sum(-2, dtype=torch.uint8)
        low = torch.cat((low.unflatten(-1, (-1, 16)), bits.flatten(-2)), dim=-1).flatten(-2)
    return low.contiguous().view(torch.int32)
