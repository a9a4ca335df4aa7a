"""Library products that stand where a kernel does: cuBLAS through torch on a GPU, torch's own on a CPU.

Their parameters are those of a kernel: tensors that start at the operands' first elements, row strides, sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def matmul(
    x_ptr: Tensor,
    x_row_stride: int,
    weight_ptr: Tensor,
    y_ptr: Tensor,
    y_row_stride: int,
    tokens: int,
    IN: int,
    OUT: int,
) -> None:
    """y[t] = W·x[t] for `tokens` rows; W: [OUT, IN]. One dtype for all; queued on torch's current stream."""
    import torch

    x = x_ptr.as_strided((tokens, IN), (x_row_stride, 1))
    if x.device.type == "cpu":  # with AMX oneDNN reads what follows a row, and a NaN there spoils the product
        x = x.contiguous()
    weight = weight_ptr.as_strided((OUT, IN), (IN, 1))
    torch.mm(x, weight.t(), out=y_ptr.as_strided((tokens, OUT), (y_row_stride, 1)))


FUNCTIONS = {"matmul": matmul}
