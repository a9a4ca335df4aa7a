"""Safetensors checkpoints: strict header checks when opened, tensors read one at a time through a memory map."""

import json
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import DOWNLOAD_AGAIN, SHARD_INDEX, SINGLE_FILE, read_json
from llmc.graph.dtype_names import TORCH_DTYPES

# The format's own limit on the header, and the size that a corrupt length field would easily exceed.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. dtype: the safetensors name (F32, BF16, …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsSource:
    """The tensors of a checkpoint directory; a WeightSource.

    Opening reads headers only. Raises CheckpointError for a missing shard, a truncated file or a corrupt header.
    entries: of the tensors, by name, where they are known.
    """

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry] | None = None) -> None:
        self.directory = directory
        self._entries = _read_entries(directory) if entries is None else entries

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._entries))

    def entry(self, name: str) -> TensorEntry:
        """File, dtype and shape of a tensor; raises CheckpointError if there is none of that name."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r} ({len(self._entries)} tensors found)",
                at=self.directory,
                fix="download the whole checkpoint again, or check that config.json belongs to it",
            )
        return entry

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; raises CheckpointError if there is none of that name."""
        return self.entry(name).shape

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        """Raise CheckpointError unless the tensor has this shape and, if asked, a floating-point type."""
        entry = self.entry(name)
        if floating and not _is_floating(entry.dtype):
            raise CheckpointError(
                f"tensor {name!r} is stored as {entry.dtype}, where the model has a floating-point one",
                at=entry.file,
                fix="use an unquantized checkpoint (F32, BF16 or F16)",
            )
        check_shape(name, entry.shape, shape, entry.file)

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype; raises CheckpointError if it is missing or broken."""
        file = self.entry(name).file
        try:
            with safetensors.safe_open(str(file), framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r}: {error}", at=file, fix=DOWNLOAD_AGAIN) from error
        return tensor

    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most elements are stored in."""
        elements: Counter[torch.dtype] = Counter()
        for entry in self._entries.values():
            if _is_floating(entry.dtype):
                elements[TORCH_DTYPES[entry.dtype]] += torch.Size(entry.shape).numel()
        if not elements:
            raise CheckpointError(
                "the checkpoint holds no floating-point tensor",
                at=self.directory,
                fix="use an unquantized checkpoint (F32, BF16 or F16)",
            )
        return max(elements, key=lambda dtype: elements[dtype])

    def headers(self) -> list[tuple[object, ...]]:
        """Names, types and shapes as the files have them."""
        return [(name, entry.dtype, entry.shape) for name, entry in sorted(self._entries.items())]


class HidingSource:
    """A WeightSource over a checkpoint some of whose weights are stored as several tensors, which it shows as one.

    shapes: of those weights, as the model knows them. hidden: what they are stored as.
    """

    def __init__(self, files: SafetensorsSource, shapes: Mapping[str, tuple[int, ...]], hidden: Set[str]) -> None:
        self.directory = files.directory
        self.files, self._shapes = files, shapes
        self._names = tuple(sorted((set(files.names()) - hidden) | set(shapes)))

    def names(self) -> tuple[str, ...]:
        """The tensors as the model knows them, sorted."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor as the model knows it. Raises CheckpointError if there is none of that name."""
        return self._shapes[name] if name in self._shapes else self.files.shape(name)

    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most elements of whole tensors are stored in."""
        return self.files.dtype()

    def headers(self) -> list[tuple[object, ...]]:
        """Names, types and shapes as the files have them, and the shapes of weights that are several tensors there."""
        return [*self.files.headers(), *((name, self.shape(name)) for name in self.names())]


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    """Raise CheckpointError unless a tensor, or what is stored as several, has the shape that the model gives it."""
    if found != expected:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(found)}, where config.json makes it {list(expected)}",
            at=file,
            fix="check that config.json belongs to these weights",
        )


def _read_entries(directory: Path) -> dict[str, TensorEntry]:
    single, index = directory / SINGLE_FILE, directory / SHARD_INDEX
    if index.is_file():
        return _read_sharded(directory, index)
    if single.is_file():
        return read_header(single)
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"the weights are pickle files ({', '.join(pickled[:3])}), which llmc does not open",
            at=directory,
            fix="convert them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT) writes safetensors",
        )
    raise CheckpointError(
        f"no weights: neither {SINGLE_FILE} nor {SHARD_INDEX} is there",
        at=directory,
        fix="download the weights too, or pass the directory that holds them",
    )


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("the shard index has no weight_map of names to files", at=index, fix=DOWNLOAD_AGAIN)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        file = directory / shard
        if not shard.isprintable() or not file.name:
            raise CheckpointError(f"the shard index names no file: {shard!r:.80}", at=index, fix=DOWNLOAD_AGAIN)
        if not file.resolve().is_relative_to(directory.resolve()) and "/" in shard:
            raise CheckpointError(f"the shard index names a file outside its directory: {shard!r}", at=index)
        try:
            is_there = file.is_file()
        except OSError as error:  # e.g. a name that is too long
            raise CheckpointError(
                f"shard {shard:.80} cannot be read: {error.strerror}", at=index, fix=DOWNLOAD_AGAIN
            ) from None
        if not is_there:
            raise CheckpointError(f"shard {shard} is missing", at=file, fix="download the missing shard")
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {name!r} is in two shards, {entries[name].file.name} and {shard}",
                    at=directory,
                    fix="remove shards that do not belong to this checkpoint",
                )
            entries[name] = entry
    missing = sorted(name for name, shard in weight_map.items() if name not in entries)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors named by the index are in no shard, first {missing[0]!r}",
            at=index,
            fix=DOWNLOAD_AGAIN,
        )
    return entries


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
                f"truncated: the file has {size} bytes, its header alone needs {8 + length if len(prefix) == 8 else 8}",
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


def _is_floating(dtype: str) -> bool:
    return dtype in TORCH_DTYPES and TORCH_DTYPES[dtype].is_floating_point


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result
