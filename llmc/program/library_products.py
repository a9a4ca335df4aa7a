"""Library products that stand where a kernel does: cuBLAS through torch on a GPU, torch's own on a CPU.

Their parameters are those of a kernel: tensors that start at the operands' first elements, row strides, sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
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
    _multiply("matmul", x_ptr, x_row_stride, weight_ptr, y_ptr, y_row_stride, tokens, IN, OUT)


def fp8_matmul(
    x_ptr: Tensor,
    x_row_stride: int,
    weight_ptr: Tensor,
    y_ptr: Tensor,
    y_row_stride: int,
    tokens: int,
    IN: int,
    OUT: int,
) -> None:
    """The same of codes of fp8 (e4m3), given as uint8: sums in fp32, which y gets in its dtype, without scales.

    IN and OUT are multiples of 16, and the rows of y follow each other without a gap.
    """
    _multiply("fp8_matmul", x_ptr, x_row_stride, weight_ptr, y_ptr, y_row_stride, tokens, IN, OUT)


def int8_matmul(
    x_ptr: Tensor,
    x_row_stride: int,
    weight_ptr: Tensor,
    y_ptr: Tensor,
    y_row_stride: int,
    tokens: int,
    IN: int,
    OUT: int,
) -> None:
    """The same of codes of int8: exact sums, in int32. There are more than 16 tokens."""
    _multiply("int8_matmul", x_ptr, x_row_stride, weight_ptr, y_ptr, y_row_stride, tokens, IN, OUT)


def _multiply(
    function: str,
    x_ptr: Tensor,
    x_row_stride: int,
    weight_ptr: Tensor,
    y_ptr: Tensor,
    y_row_stride: int,
    tokens: int,
    IN: int,
    OUT: int,
) -> None:
    x_ptr, weight_ptr = as_operand(function, x_ptr), as_operand(function, weight_ptr)
    x = x_ptr.as_strided((tokens, IN), (x_row_stride, 1))
    transposed, y = weight_ptr.as_strided((OUT, IN), (IN, 1)).t(), y_ptr.as_strided((tokens, OUT), (y_row_stride, 1))
    if x.device.type != "cpu" and (function == "matmul" or y.is_contiguous()):
        MULTIPLY[function](x, transposed, y)
        return
    import torch

    # With AMX oneDNN reads what follows a row, and a NaN there spoils the product. Products of codes have no gaps.
    whole = torch.empty((tokens, OUT), dtype=y.dtype, device=y.device)
    MULTIPLY[function](x.contiguous(), transposed, whole)
    y.copy_(whole)


def as_operand(function: str, elements: Tensor) -> Tensor:
    """The elements of x or W in the dtype in which the function multiplies them."""
    import torch

    return elements.view(torch.float8_e4m3fn) if function == "fp8_matmul" else elements


def _matmul(x: Tensor, transposed: Tensor, y: Tensor) -> None:
    import torch

    torch.mm(x, transposed, out=y)


def _fp8_matmul(x: Tensor, transposed: Tensor, y: Tensor) -> None:
    """One scale for each tensor is in cuBLAS since CUDA 11.8. A scale for each row is a kernel of torch's own in older
    versions, which has ignored the stream that it should run on."""
    import torch

    one = unit_scale(x.device)
    torch._scaled_mm(x, transposed, one, one, out_dtype=y.dtype, use_fast_accum=False, out=y)


def _int8_matmul(x: Tensor, transposed: Tensor, y: Tensor) -> None:
    import torch

    torch._int_mm(x, transposed, out=y)


@cache
def unit_scale(device: torch.device) -> Tensor:
    """The scale 1 on a device; kept, because a graph that is captured must not make it."""
    import torch

    return torch.ones((), dtype=torch.float32, device=device)


FUNCTIONS = {"matmul": matmul, "fp8_matmul": fp8_matmul, "int8_matmul": int8_matmul}
# The functions of x [tokens, IN], Wᵀ [IN, OUT] and y [tokens, OUT].
MULTIPLY: Mapping[str, Callable[[Tensor, Tensor, Tensor], None]] = MappingProxyType(
    {"matmul": _matmul, "fp8_matmul": _fp8_matmul, "int8_matmul": _int8_matmul}
)
