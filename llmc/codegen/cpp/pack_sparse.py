"""Put weights into sparse panels (kernels/api.h): a bit for each element of a panel, and those that are not zero."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.codegen.cpp.pack import pack, packed_nbytes
from llmc.codegen.cpp.pack_codes import CodeShape, panel_codes, panel_rows
from llmc.codegen.cpp.panel import PANEL
from llmc.formats.code_format import CODE_FORMATS
from llmc.ops.sparse_weight import is_stored
from llmc.program import Layout

# The layout of the same weight with its zeros.
DENSE = {
    Layout.SPARSE_PANELS: Layout.PANELS,
    Layout.GATED_SPARSE_PANELS: Layout.GATED_PANELS,
    Layout.SPARSE_CODE_PANELS: Layout.CODE_PANELS,
    Layout.GATED_SPARSE_CODE_PANELS: Layout.GATED_CODE_PANELS,
}
# Bytes that may be read after the last element.
_READ_BEYOND = 64
_PANELS_AT_A_TIME = 64


@dataclass(frozen=True)
class SparseShape:
    """The sizes that determine a sparse weight's bytes. elements: number in one panel, including zeros; itemsize: bytes
    of one. header: bytes of a panel's scales."""

    panels: int
    elements: int
    itemsize: int
    header: int = 0

    @property
    def masks(self) -> int:
        return -(-self.elements // 64)

    @property
    def starts(self) -> tuple[int, int, int]:
        """The bytes at which masks, scales and elements begin."""
        masks = 8 * (self.panels + 1)
        headers = masks + 8 * self.panels * self.masks
        return masks, headers, headers + self.panels * self.header

    def nbytes(self, count: int) -> int:
        """Bytes of the weight with `count` nonzero elements, rounded up to multiples of four."""
        return -(-(self.starts[2] + count * self.itemsize + _READ_BEYOND) // 4) * 4


def sparse_shape(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, scales: Tensor | None) -> SparseShape:
    """The sizes of a weight [out, in] in sparse panels, or of codes with scales [out, groups] in sparse code panels.
    Raises LoweringError for a shape that the layout does not fit."""
    if scales is None:
        elements = packed_nbytes(shape, DENSE[layout], dtype) // dtype.itemsize
        panels = -(-shape[0] // PANEL)
        return SparseShape(panels, elements // max(panels, 1), dtype.itemsize)
    groups = int(scales.shape[1])
    codes = CodeShape(shape, groups, "int8", scales.dtype, has_zeros=False)
    panels = codes.nbytes(DENSE[layout]) // (groups * codes.run_nbytes)
    return SparseShape(panels, 4 * PANEL * groups * codes.words, 1, PANEL * groups * scales.dtype.itemsize)


def pack_sparse(weight: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in SPARSE_PANELS or GATED_SPARSE_PANELS: 1-D, its bytes viewed as elements of dtype."""
    shape = sparse_shape(tuple(weight.shape), layout, dtype, None)
    dense = pack(weight, DENSE[layout], dtype).view(shape.panels, shape.elements)
    chunks = ((part, is_stored(part)) for part in dense.split(_PANELS_AT_A_TIME))
    return _put(shape, chunks, None).view(dtype)


def pack_sparse_codes(codes: Tensor, scales: Tensor, layout: Layout) -> Tensor:
    """Symmetric int8 codes [out, in] with scales [out, groups] in SPARSE_CODE_PANELS or GATED_SPARSE_CODE_PANELS."""
    shape = sparse_shape(tuple(codes.shape), layout, codes.dtype, scales)
    of_codes = CodeShape(tuple(codes.shape), scales.shape[1], "int8", scales.dtype, has_zeros=False)
    rows = panel_rows(codes.shape[0], DENSE[layout], shape.panels)
    zero = CODE_FORMATS["int8"].unsigned_shift

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for of_panels in rows.split(_PANELS_AT_A_TIME):
            part = panel_codes(of_panels, of_codes, codes).view(torch.uint8).flatten(1)
            yield part, part != zero

    kept = torch.where(rows[..., None] >= 0, scales[rows.clamp_min(0)], torch.zeros((), dtype=scales.dtype))
    return _put(shape, chunks(), kept.transpose(1, 2).contiguous())


def _put(shape: SparseShape, chunks: Iterator[tuple[Tensor, Tensor]], scales: Tensor | None) -> Tensor:
    """chunks: elements of some panels [panels, elements], and which of them are stored."""
    masks, values, counts = [], [], []
    for elements, kept in chunks:
        bits = torch.nn.functional.pad(kept.to(torch.uint8), (0, -shape.elements % 64)).unflatten(1, (-1, 8))
        masks.append((bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8).flatten())
        values.append(elements[kept].view(torch.uint8))
        counts.append(kept.sum(1))
    ends = torch.cat(counts).cumsum(0)
    packed = torch.zeros(shape.nbytes(int(ends[-1])), dtype=torch.uint8)
    offsets = shape.starts[2] + shape.itemsize * torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    scaled = [] if scales is None else [scales.view(torch.uint8).flatten()]
    start = 0
    for part in (offsets.view(torch.uint8), *masks, *scaled, *values):
        packed[start : start + len(part)] = part
        start += len(part)
    return packed
