"""ONNX types of torch tensors. Floating-point numbers are fp32 there, for any dtype of the model."""

from typing import Any

import onnx
import sympy
import torch
from onnx import TensorProto

# Standard ops have RMSNormalization and RotaryEmbedding from here on.
OPSET = 23
# Functions have overloads and nodes metadata.
IR_VERSION = 10

_TYPES: dict[torch.dtype, int] = {
    torch.float64: TensorProto.FLOAT,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.FLOAT,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


def onnx_type(dtype: torch.dtype) -> int:
    """The element type of values of a dtype: FLOAT for all floating-point numbers."""
    return _TYPES[dtype]


def value_info(name: str, value: Any, size_text: dict[Any, str]) -> onnx.ValueInfoProto:
    """A tensor's name, type and shape; a symbolic size (SymInt) is an INT64 scalar.

    size_text: what symbolic sizes are called, by expression; filled with those that it does not know.
    """
    if not isinstance(value, torch.Tensor):
        return onnx.helper.make_tensor_value_info(name, TensorProto.INT64, [])
    shape = [size if isinstance(size, int) else _text(size, size_text) for size in value.shape]
    return onnx.helper.make_tensor_value_info(name, onnx_type(value.dtype), shape)


def _text(size: torch.SymInt, known: dict[Any, str]) -> str:
    expression = size.node.expr
    return known.setdefault(expression, str(expression.xreplace({k: _symbol(v) for k, v in known.items()})))


def _symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True, positive=True)
