"""The header of a safetensors file, checked strictly: names, types, shapes and places of its tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import DOWNLOAD_AGAIN
from llmc.graph.dtype_names import TORCH_DTYPES

# The format's own limit on the header, and the size that a corrupt length field would easily exceed.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """The type, shape and place of a tensor. dtype: the safetensors name (F32, BF16, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file. Raises CheckpointError for a file that is truncated, or whose header is corrupt."""
    try:
        raw, size = _header_bytes(file)
    except OSError as error:
        raise CheckpointError(f"cannot read it: {error.strerror}", at=file, fix="check its permissions") from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"corrupt header: {error}", at=file, fix=DOWNLOAD_AGAIN) from None
    if not isinstance(header, dict):
        raise CheckpointError("corrupt header: not a JSON object", at=file, fix=DOWNLOAD_AGAIN)
    header.pop("__metadata__", None)
    entries = {name: _check_entry(name, value, file) for name, value in header.items()}
    end = max((value["data_offsets"][1] for value in header.values()), default=0)
    described = 8 + len(raw) + end
    if described != size:
        seen = "truncated" if described > size else "has trailing bytes"
        raise CheckpointError(
            f"{seen}: the file has {size} bytes, its header describes {described}", at=file, fix=DOWNLOAD_AGAIN
        )
    return entries


def _header_bytes(file: Path) -> tuple[bytes, int]:
    """The header's JSON text, and the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise CheckpointError(
                f"truncated: the file has {size} bytes, its header needs {8 + length if len(prefix) == 8 else 8}",
                at=file,
                fix=DOWNLOAD_AGAIN,
            )
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"not a safetensors file: its header claims {length} bytes", at=file)
        return stream.read(length), size


def _check_entry(name: str, value: Any, file: Path) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        valid = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"corrupt header entry for {name!r}: {value!r}"[:200], at=file, fix=DOWNLOAD_AGAIN)
    known = TORCH_DTYPES.get(dtype)  # a type that torch lacks may be there, but cannot be a weight
    expected = None if known is None else torch.Size(shape).numel() * known.itemsize
    if expected is not None and end - start != expected:
        raise CheckpointError(
            f"corrupt header: {name!r} of {dtype} {list(shape)} needs {expected} bytes but has {end - start}",
            at=file,
            fix=DOWNLOAD_AGAIN,
        )
    return TensorEntry(file, dtype, shape)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result
