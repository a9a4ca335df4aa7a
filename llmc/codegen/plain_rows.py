"""Layout ROWS, which every kind of target has: a weight's elements in order."""

from torch import Tensor

from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import WeightSlot


def plain_rows(weight: Tensor, slot: WeightSlot) -> Tensor:
    """The elements in the slot's dtype: 1-D, contiguous."""
    return weight.to(TORCH_DTYPES[slot.dtype]).reshape(-1).contiguous()
