"""A safetensors file as numpy arrays: checked strictly, mapped, and turned into float32 one tensor at a time."""

import json
import math
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import AdapterError

Floats = npt.NDArray[np.float32]

_MOST_HEADER_BYTES = 16 << 20
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsFile:
    """The tensors of one file. Opening checks the header; raises AdapterError for anything that is not as it should."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            self._bytes = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        except (OSError, ValueError) as error:
            raise AdapterError(f"cannot read the weights: {error}", at=path, fix=_SAVE_IT) from None
        self._entries = self._checked()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name, in order."""
        return {name: self._entries[name].shape for name in sorted(self._entries)}

    def load(self, name: str) -> Floats:
        """A tensor in float32; finite or not, as it is stored."""
        entry = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        raw = self._bytes[entry.begin : entry.begin + count * dtype.itemsize].view(dtype).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def digest(self) -> str:
        """SHA-256 of the whole file."""
        return sha256(self._bytes.data).hexdigest()

    def _checked(self) -> dict[str, _Entry]:
        size = len(self._bytes)
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise AdapterError(f"the header claims {length} bytes, the file has {size}", at=self.path, fix=_SAVE_IT)
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
            header.pop("__metadata__", None)
            return {str(name): _entry(entry, 8 + length, size) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            problem = f"the header is not that of safetensors: {error!s:.120}"
            raise AdapterError(problem, at=self.path, fix=_SAVE_IT) from None


_SAVE_IT = "save the adapter again, or copy its whole directory"


def _entry(entry: dict[str, Any], data: int, size: int) -> _Entry:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"a tensor is {dtype!r:.20}; LoRA tensors must be floating-point")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)) or len(shape) > 8:
        raise ValueError(f"shape {shape!r:.60} or offsets {[begin, end]!r:.60} are not sizes")
    if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize or data + end > size:
        raise ValueError(f"a tensor {dtype} {shape} at {[begin, end]} does not fit a file of {size} bytes")
    return _Entry(dtype, tuple(shape), data + begin)
