"""Tensors of a file as values of a graph that is being traced: known numbers if there are few."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from llmc.frontends.onnx.tensors import OnnxTensor

_FEW = 1024
NUMPY_DTYPES: Mapping[torch.dtype, Any] = MappingProxyType(
    {
        torch.float16: np.float16,
        torch.bfloat16: np.float32,
        torch.float32: np.float32,
        torch.float64: np.float64,
        torch.int8: np.int8,
        torch.int16: np.int16,
        torch.int32: np.int32,
        torch.int64: np.int64,
        torch.uint8: np.uint8,
        torch.uint16: np.uint16,
        torch.uint32: np.uint32,
        torch.uint64: np.uint64,
        torch.bool: np.bool_,
    }
)


def constant(tensor: OnnxTensor) -> Tensor | NDArray[Any]:
    """Return the numbers of a tensor: known ones if there are few, and a real tensor even if a trace makes fake
    ones."""
    with unset_fake_temporarily():
        value = tensor.load()
        if is_known(tensor):
            return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    return value


def is_known(tensor: OnnxTensor) -> bool:
    """Whether its numbers are known ones: a single number, or a few whole ones."""
    few = tensor.numel <= _FEW and not tensor.dtype.is_floating_point
    return tensor.packed is None and (few or (tensor.numel == 1 and len(tensor.shape) <= 1))
