"""Tensors of an ONNX file: checked when the file is opened, and read one at a time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.onnx.external_data import ExternalBytes, external_bytes

DOWNLOAD_AGAIN = "download the file again, or export the model again"
# By ONNX's numbers: elements, which field holds them where raw_data does not, and how its numbers become their bytes.
_ELEMENTS: Mapping[int, tuple[torch.dtype, str, Any]] = MappingProxyType(
    {
        1: (torch.float32, "float_data", np.float32),
        2: (torch.uint8, "int32_data", np.uint8),
        3: (torch.int8, "int32_data", np.int8),
        4: (torch.uint16, "int32_data", np.uint16),
        5: (torch.int16, "int32_data", np.int16),
        6: (torch.int32, "int32_data", np.int32),
        7: (torch.int64, "int64_data", np.int64),
        9: (torch.bool, "int32_data", np.bool_),
        10: (torch.float16, "int32_data", np.uint16),
        11: (torch.float64, "double_data", np.float64),
        12: (torch.uint32, "uint64_data", np.uint32),
        13: (torch.uint64, "uint64_data", np.uint64),
        16: (torch.bfloat16, "int32_data", np.uint16),
        21: (torch.uint8, "int32_data", np.uint8),
        22: (torch.uint8, "int32_data", np.uint8),
    }
)
# Two lie in a byte, the first one low.
_FOUR_BITS = {21: "uint4", 22: "int4"}
DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {number: dtype for number, (dtype, _, _) in _ELEMENTS.items() if number not in _FOUR_BITS}
)
_MOST_AXES = 16


@dataclass(frozen=True)
class OnnxTensor:
    """A tensor of an ONNX file. dtype: the dtype of elements; uint8 for elements of four bits, with `packed` the name
    of their type. shape: the shape in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: ExternalBytes | Any
    file: Path
    packed: str | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def load(self) -> Tensor:
        """Read the tensor to the CPU, as it is stored; with four bits the bytes, [numel / 2]. Raises
        CheckpointError."""
        content = self.data.read() if isinstance(self.data, ExternalBytes) else bytearray(_bytes(self.data))
        if not content:
            return torch.empty(self.shape, dtype=self.dtype)
        values = torch.frombuffer(content, dtype=self.dtype)
        return values if self.packed is not None else values.view(self.shape)


def utf8(value: str | bytes, file: Path) -> str:
    """A text of a file. Raises CheckpointError for bytes that are none, which protobuf hands on as they are."""
    if isinstance(value, bytes):
        raise damaged(f"a name is not UTF-8: {value!r:.80}", file)
    return value


def read_tensor(proto: Any, file: Path) -> OnnxTensor:
    """The entry of a TensorProto, whose data stay where they are. Raises CheckpointError for one that is not whole."""
    name, shape = utf8(proto.name, file), tuple(proto.dims)
    if proto.data_type not in _ELEMENTS:
        raise CheckpointError(
            f"tensor {name!r:.80} has ONNX type {proto.data_type}, which llmc does not read",
            at=file,
            fix="llmc reads floating-point numbers of 16 to 64 bits, integers, booleans, and codes of MatMulNBits",
        )
    if len(shape) > _MOST_AXES or any(size < 0 for size in shape) or math.prod(shape) >= 1 << 62:
        raise damaged(f"tensor {name!r:.80} has shape {list(shape)!s:.120}", file)
    (dtype, _, _), packed = _ELEMENTS[proto.data_type], _FOUR_BITS.get(proto.data_type)
    count = math.prod(shape)
    nbytes = -(-count // 2) if packed is not None else count * dtype.itemsize
    if proto.HasField("segment"):
        raise damaged(f"tensor {name!r:.80} is cut into segments", file)
    if proto.data_location == 1:
        entries = {utf8(entry.key, file): utf8(entry.value, file) for entry in proto.external_data}
        return OnnxTensor(name, dtype, shape, external_bytes(file, name, entries, nbytes), file, packed)
    if len(proto.raw_data if proto.HasField("raw_data") else _bytes(proto)) != nbytes:
        raise damaged(f"tensor {name!r:.80} of {dtype} {list(shape)!s:.120} does not have {nbytes} bytes", file)
    return OnnxTensor(name, dtype, shape, proto, file, packed)


def _bytes(proto: Any) -> bytes:
    if proto.HasField("raw_data"):
        raw: bytes = proto.raw_data
        return raw
    _, field, kind = _ELEMENTS[proto.data_type]
    numbers = np.asarray(getattr(proto, field))
    return numbers.astype(kind).tobytes()


def damaged(problem: str, file: Path) -> CheckpointError:
    """Return the error for a file that is damaged or was changed."""
    return CheckpointError(f"damaged ONNX file: {problem}", at=file, fix=DOWNLOAD_AGAIN)
