"""Weights in kernel layout as safetensors files, written as a stream: the header first, then one tensor at a time.

Every tensor starts at a multiple of 64 bytes in the file. safetensors allows no holes, so the gap before a tensor is
itself a tensor of bytes, named `padding.N`. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.program import ITEMSIZES, Layout, WeightSlot

ALIGNMENT = 64
SHARD_BYTES = 4 << 30
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: bytes begin:end of the file `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def plan_shards(slots: Sequence[WeightSlot], shard_bytes: int = SHARD_BYTES) -> tuple[tuple[WeightSlot, ...], ...]:
    """Cut the slots, in order, into files of at most `shard_bytes`; a larger tensor gets its own."""
    shards: list[list[WeightSlot]] = []
    size = 0
    for slot in slots:
        if not shards or size + slot.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(slot)
        size += slot.nbytes
    return tuple(tuple(shard) for shard in shards)


def header(slots: Sequence[WeightSlot]) -> tuple[bytes, tuple[int, ...]]:
    """The file's bytes up to its data, and the number of padding bytes in front of each slot's tensor."""
    entries: dict[str, object] = {}
    gaps: list[int] = []
    offset = 0
    for index, slot in enumerate(slots):
        gap = -offset % ALIGNMENT
        if gap:
            entries[f"padding.{index}"] = _entry("U8", (gap,), offset, offset + gap)
        gaps.append(gap)
        offset += gap
        entries[slot.name] = _entry(slot.dtype, _stored_shape(slot), offset, offset + slot.nbytes)
        offset += slot.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, tuple(gaps)


def read_header(file: memoryview, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, after checking that they lie within it. Raises EngineFormatError."""
    size = len(file)
    length = int.from_bytes(file[:8], "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise EngineFormatError(
            f"the header claims {length} bytes, the file has {size}", at=path, fix="copy or rebuild the engine"
        )
    try:
        entries = json.loads(bytes(file[8 : 8 + length]))
        return {name: _parse_entry(path, entry, 8 + length, size) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EngineFormatError(f"the header is not that of safetensors: {error}", at=path, fix=REBUILD) from None


def check_slot(slot: WeightSlot, stored: StoredTensor) -> None:
    """Raise EngineFormatError if the stored tensor is not what the program expects in that slot."""
    expected = (slot.dtype, _stored_shape(slot), slot.nbytes)
    actual = (stored.dtype, stored.shape, stored.end - stored.begin)
    if expected != actual or stored.begin % ALIGNMENT:
        raise EngineFormatError(
            f"weight {slot.name!r} is {actual[0]} {list(actual[1])} in {actual[2]} bytes at {stored.begin}, "
            f"the program expects {expected[0]} {list(expected[1])} in {expected[2]} bytes at a multiple of "
            f"{ALIGNMENT}",
            at=stored.path,
            fix=REBUILD,
        )


def runs_of_tensors(tensors: Iterable[StoredTensor]) -> list[list[StoredTensor]]:
    """The tensors in groups that lie side by side in a file, each in order."""
    runs: list[list[StoredTensor]] = []
    for stored in sorted(set(tensors), key=lambda tensor: (tensor.path, tensor.begin)):
        last = runs[-1][-1] if runs else None
        if last is None or last.path != stored.path or stored.begin >= last.end + ALIGNMENT:
            runs.append([])
        runs[-1].append(stored)
    return runs


def _stored_shape(slot: WeightSlot) -> tuple[int, ...]:
    """Row-major weights keep their shape; packed ones are flat, padding included."""
    if slot.layout is Layout.ROWS:
        return slot.shape
    return (slot.nbytes // ITEMSIZES[slot.dtype],)


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _parse_entry(path: Path, entry: dict[str, object], data: int, size: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or not isinstance(dtype, str):
        raise TypeError(f"the entry {entry} is malformed")
    numbers = [*shape, *offsets]
    if len(offsets) != 2 or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"shape {shape} or offsets {offsets} are not sizes")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEMSIZES[dtype] or data + end > size:
        raise ValueError(f"a tensor {dtype} {shape} at {offsets} does not fit a file of {size} bytes")
    return StoredTensor(path, dtype, tuple(shape), data + begin, data + end)
