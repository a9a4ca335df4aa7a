"""Safetensors checkpoints: strict header checks when opened, tensors read one at a time through a memory map."""

from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import DOWNLOAD_AGAIN
from llmc.frontends.checkpoints.safetensors_header import TensorEntry
from llmc.frontends.checkpoints.shards import TensorFiles, read_tensor_files
from llmc.graph.dtype_names import TORCH_DTYPES

# Dtypes with too few bits for plain weights: their scales must be known.
_SCALED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


class SafetensorsSource:
    """The tensors of a checkpoint directory; a WeightSource.

    Opening reads headers only. Raises CheckpointError for a missing shard, a truncated file or a corrupt header.
    entries: the header entries of the tensors, by name, if they are known. notes: for a build to print.
    """

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry] | None = None) -> None:
        self.directory = directory
        files = read_tensor_files(directory) if entries is None else TensorFiles(entries)
        self._entries, self.notes = files.entries, files.notes

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""
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
        """The shape of a tensor. Raises CheckpointError if there is none of that name."""
        return self.entry(name).shape

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        """Raise CheckpointError unless the tensor has this shape and, if asked, a floating-point type."""
        entry = self.entry(name)
        if floating and entry.dtype in _SCALED:
            others = [candidate for candidate in self._entries if candidate.startswith(name) and candidate != name]
            with_scales = f", next to {', '.join(sorted(others)[:3])}" if others else ""
            raise CheckpointError(
                f"tensor {name!r} is stored as {entry.dtype}{with_scales}, and no file says how its numbers are scaled",
                at=entry.file,
                fix="download config.json again (its quantization_config says it), or the F32, BF16 or F16 checkpoint",
            )
        if floating and not _is_floating(entry.dtype):
            raise CheckpointError(
                f"tensor {name!r} is stored as {entry.dtype}, but the model has a floating-point tensor",
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
            if _is_floating(entry.dtype) and entry.dtype not in _SCALED:
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

    shapes: the shapes of those weights, as the model knows them. hidden: the names of the tensors that store them.
    """

    def __init__(self, files: SafetensorsSource, shapes: Mapping[str, tuple[int, ...]], hidden: Set[str]) -> None:
        self.directory, self.notes = files.directory, files.notes
        self.files, self._shapes = files, shapes
        self._names = tuple(sorted((set(files.names()) - hidden) | set(shapes)))

    def names(self) -> tuple[str, ...]:
        """The tensors as the model knows them, sorted."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor by the model's name. Raises CheckpointError if there is none of that name."""
        return self._shapes[name] if name in self._shapes else self.files.shape(name)

    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most elements of whole tensors are stored in."""
        return self.files.dtype()

    def headers(self) -> list[tuple[object, ...]]:
        """Names, types and shapes as the files have them, and the shapes of weights that are several tensors there."""
        return [*self.files.headers(), *((name, self.shape(name)) for name in self.names())]


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    """Raise CheckpointError unless a tensor, or what is stored as several, has the shape that the model gives it."""
    if shape != expected:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(shape)}, but config.json gives it the shape {list(expected)}",
            at=file,
            fix="check that config.json belongs to these weights",
        )


def _is_floating(dtype: str) -> bool:
    return dtype in TORCH_DTYPES and TORCH_DTYPES[dtype].is_floating_point
