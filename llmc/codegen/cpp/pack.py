"""Put weights into the layouts that the CPU kernels read: panels of 32 output rows (kernels/api.h)."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmc.codegen.cpp.panel import PANEL
from llmc.errors import LoweringError
from llmc.program import Layout


def pack(weight: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The weight's elements in the given layout: 1-D, contiguous, of `dtype` (VECTOR_F32: always fp32).

    weight: [out, in] for panels, where GATED_PANELS takes gate's rows followed by up's, or several such matrices, which
    are packed separately; any shape otherwise. Raises LoweringError for a shape that the layout does not fit.
    """
    if layout is Layout.ROWS:
        return weight.to(dtype).reshape(-1).contiguous()
    if layout is Layout.VECTOR_F32:
        return weight.float().reshape(-1).contiguous()
    if weight.dim() == 3:
        return torch.cat([pack(matrix, layout, dtype) for matrix in weight])
    panels = padded_rows(tuple(weight.shape), layout) // PANEL
    words = _words(weight.to(dtype))
    packed = np.zeros((panels, words.shape[1], PANEL), np.int32)
    parts = (words,) if layout is Layout.PANELS else np.split(words, 2)
    lanes = PANEL // len(parts)
    for panel in range(panels):
        for i, part in enumerate(parts):
            block = part[panel * lanes : (panel + 1) * lanes]
            packed[panel, :, i * lanes : i * lanes + len(block)] = block.T
    return torch.from_numpy(packed.reshape(-1)).view(dtype)


def packed_nbytes(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of `pack`'s result for a weight of this shape, padding included."""
    if layout in (Layout.ROWS, Layout.VECTOR_F32):
        return math.prod(shape) * (4 if layout is Layout.VECTOR_F32 else dtype.itemsize)
    if len(shape) == 3:
        return shape[0] * packed_nbytes(shape[1:], layout, dtype)
    step = _step(dtype)
    return padded_rows(shape, layout) * -(-shape[1] // step) * step * dtype.itemsize


def _step(dtype: torch.dtype) -> int:
    """Number of neighbouring k of an output row that are adjacent: those that fit into 32 bits (one bf16 dot
    product)."""
    return 4 // dtype.itemsize


def _words(weight: Tensor) -> npt.NDArray[np.int32]:
    """[out, steps]: the row's elements of one step as one 32-bit word, the last step filled up with zeros."""
    padding = -weight.shape[1] % _step(weight.dtype)
    if padding:
        weight = torch.nn.functional.pad(weight, (0, padding))
    words: npt.NDArray[np.int32] = weight.contiguous().view(torch.int32).numpy()
    return words


def padded_rows(shape: tuple[int, ...], layout: Layout) -> int:
    """Rows of a weight in PANELS or GATED_PANELS. Raises LoweringError for a shape that the layout does not fit."""
    if len(shape) != 2:
        raise LoweringError(f"a weight of shape {list(shape)} cannot be put into {layout.value}: it is not a matrix")
    if layout is Layout.GATED_PANELS and shape[0] % 2:
        raise LoweringError(
            f"a gated weight has one up row per gate row, but this one has an odd number of rows, {shape[0]}"
        )
    return -(-shape[0] // PANEL) * PANEL
