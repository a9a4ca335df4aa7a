"""GGUF's container: metadata and a table of tensors, checked against the file before anything is believed.

The format is llama.cpp's (gguf.md in its repository), versions 2 and 3, little-endian. Every count is held against the
bytes that are left, sizes are Python's integers, which do not overflow, and no tensor reaches beyond the file or into
another one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from llmc.errors import CheckpointError
from llmc.frontends.gguf.block_types import BLOCK_TYPES, BlockType
from llmc.frontends.gguf.byte_reader import DOWNLOAD_AGAIN, ByteReader
from llmc.frontends.gguf.metadata import Metadata, Value

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ELEMENTS = 1 << 22
_LONGEST_NAME = 1024
_MOST_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
# By their numbers in files, as `struct` calls them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry in a file's table. shape: outermost axis first, as in torch. start: offset of its first byte in
    the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in the file, in bytes."""
        return math.prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True)
class GgufModel:
    """The contents of a GGUF file, or of all files that a model is split into. path: the first file."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_model(files: Sequence[Path]) -> GgufModel:
    """The headers of all files of a model. Raises CheckpointError."""
    parts = [_read(file) for file in files]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in two files, {tensors[name].file.name} and {part.path.name}",
                    at=part.path,
                    fix=DOWNLOAD_AGAIN,
                )
            tensors[name] = tensor
    first = parts[0]
    count = first.metadata.whole("split.count", default=1)
    if count > 1 and count != len(files):
        raise CheckpointError(
            f"the model is split into {count} files, but the directory has {len(files)}",
            at=first.path,
            fix="give the first, under its original name …-00001-of-0000N.gguf, with the others in its directory",
        )
    return GgufModel(first.path, first.metadata, tensors)


def files_of(path: Path) -> tuple[Path, ...]:
    """A model's file, or all that it is split into, by the name of any. Raises CheckpointError for a missing one."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    files = tuple(path.with_name(f"{match['stem']}-{i:05}-of-{match['count']}.gguf") for i in range(1, count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"the model is split into {count} files, and {len(missing)} are missing: {missing[0]}",
            at=path,
            fix="download them into the same directory",
        )
    return files


def read_bytes(tensor: GgufTensor, start: int = 0, count: int | None = None) -> bytearray:
    """A tensor's bytes, or some of them. Raises CheckpointError for a file that has changed."""
    count = tensor.nbytes - start if count is None else count
    content = bytearray(count)
    try:
        with tensor.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.start + start)
            view, filled = memoryview(content), 0
            while filled < count:
                filled_now = stream.readinto(view[filled:])
                if not filled_now:
                    raise CheckpointError(
                        f"the file became shorter: tensor {tensor.name} ends after {start + filled} of "
                        f"{tensor.nbytes} bytes",
                        at=tensor.file,
                        fix=DOWNLOAD_AGAIN,
                    )
                filled += filled_now
    except OSError as error:
        raise CheckpointError(
            f"cannot read it: {error.strerror}", at=tensor.file, fix="check its permissions"
        ) from None
    return content


def _read(path: Path) -> GgufModel:
    if not path.is_file():
        kind = "no regular file" if path.exists() else "no such file"
        raise CheckpointError(kind, at=path, fix="name a .gguf file, or a model directory")
    try:
        with path.open("rb") as stream:
            return _read_header(ByteReader(stream, path.stat().st_size, path), path)
    except OSError as error:
        raise CheckpointError(f"cannot read it: {error.strerror}", at=path, fix="check its permissions") from None


def _read_header(reader: ByteReader, path: Path) -> GgufModel:
    magic = reader.take(4, "the file's mark")
    if magic != MAGIC:
        raise CheckpointError(
            f"not a GGUF file: it begins with {magic!r}", at=path, fix="name a .gguf file, or a model directory"
        )
    version = int(reader.number("I", "the version"))
    if version not in _VERSIONS:
        other = " (or a big-endian file)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(
            f"GGUF version {version}{other} is not supported",
            at=path,
            fix="llmc reads versions 2 and 3, little-endian: write it again with a current llama.cpp",
        )
    count = reader.count("the number of tensors", 32)
    values: dict[str, Value] = {}
    for _ in range(reader.count("the number of metadata", 13)):
        key = reader.text("a metadata key")
        if key in values:
            raise reader.error(f"metadata {key!r:.80} appears twice")
        values[key] = _value(reader, int(reader.number("I", f"the type of {key!r:.80}")), key)
    metadata = Metadata(values, path)
    table = [_entry(reader, path) for _ in range(count)]
    return GgufModel(path, metadata, _placed(table, reader, metadata))


def _value(reader: ByteReader, kind: int, key: str) -> Value:
    if kind == _STRING:
        return reader.text(f"metadata {key!r:.80}")
    if kind in _NUMBERS:
        return _shown(reader.number(_NUMBERS[kind], f"metadata {key!r:.80}"), _NUMBERS[kind])
    if kind != _ARRAY:
        raise reader.error(f"metadata {key!r:.80} is of type {kind}, which does not exist")
    of = int(reader.number("I", f"the type of {key!r:.80}"))
    if of != _STRING and of not in _NUMBERS:
        raise reader.error(f"metadata {key!r:.80} is an array of type {of}, which llmc does not read")
    form = np.dtype(_NUMBERS.get(of, "Q")).newbyteorder("<")
    count = reader.count(f"the length of {key!r:.80}", form.itemsize)
    if count > _MOST_ELEMENTS:
        raise reader.error(f"metadata {key!r:.80} has {count} elements, more than {_MOST_ELEMENTS}")
    if of == _STRING:
        return tuple(reader.text(f"an element of {key!r:.80}") for _ in range(count))
    return tuple(np.frombuffer(reader.take(count * form.itemsize, f"metadata {key!r:.80}"), form).tolist())


def _shown(value: int | float | bool, form: str) -> int | float | bool:
    """A number of 32 bits as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if form == "f" else value


def _entry(reader: ByteReader, path: Path) -> GgufTensor:
    """A line of the table; `start` is still within the data."""
    name = reader.text("a tensor's name")
    if len(name) > _LONGEST_NAME:
        raise reader.error(f"a tensor's name has {len(name)} characters: {name!r:.80}")
    axes = int(reader.number("I", f"the dimensions of {name!r:.80}"))
    if not 1 <= axes <= 4:
        raise reader.error(f"tensor {name!r:.80} has {axes} dimensions, expected 1 to 4")
    shape = tuple(int(reader.number("Q", f"the shape of {name!r:.80}")) for _ in range(axes))[::-1]
    number, start = int(reader.number("I", f"the type of {name!r:.80}")), int(reader.number("Q", "an offset"))
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"tensor {name!r:.80} has ggml type {number}, which llmc does not read",
            at=path,
            fix=f"llmc reads {', '.join(known.name for known in BLOCK_TYPES.values())}",
        )
    if min(shape) < 1 or math.prod(shape) >= 1 << 63:
        raise reader.error(f"tensor {name!r:.80} has shape {list(shape)}")
    if shape[-1] % kind.elements:
        raise reader.error(
            f"tensor {name!r:.80} has rows of {shape[-1]}, not a multiple of {kind.name}'s {kind.elements}"
        )
    return GgufTensor(name, kind, shape, path, start)


def _placed(table: Sequence[GgufTensor], reader: ByteReader, metadata: Metadata) -> dict[str, GgufTensor]:
    """The tensors by name, where they are in the file. Raises CheckpointError for one that is not wholly there."""
    alignment = metadata.whole("general.alignment", default=32)
    if not (0 < alignment <= _MOST_ALIGNMENT and alignment & (alignment - 1) == 0):
        raise reader.error(f"general.alignment is {alignment}, not a power of two up to {_MOST_ALIGNMENT}")
    data = -(-reader.position // alignment) * alignment
    size = reader.position + reader.left
    placed: dict[str, GgufTensor] = {}
    for entry in table:
        tensor = GgufTensor(entry.name, entry.type, entry.shape, entry.file, data + entry.start)
        end = tensor.start + tensor.nbytes
        if end > size:
            raise reader.error(
                f"tensor {tensor.name!r:.80}, {tensor.type.name} {list(tensor.shape)}, ends at byte {end} of {size}"
            )
        if entry.start % alignment:
            raise reader.error(f"tensor {tensor.name!r:.80} begins at {entry.start}, not a multiple of {alignment}")
        if tensor.name in placed:
            raise reader.error(f"tensor {tensor.name!r:.80} appears twice")
        placed[tensor.name] = tensor
    ordered = sorted(placed.values(), key=lambda tensor: tensor.start)
    for before, after in pairwise(ordered):
        if before.start + before.nbytes > after.start:
            raise reader.error(f"tensors {before.name!r:.80} and {after.name!r:.80} overlap")
    return placed
