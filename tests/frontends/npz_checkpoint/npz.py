"""Weights in one NumPy archive beside config.json: weights.npz, where `NAME.codes` and `NAME.scales` are int8 codes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.model_directory import model_directory
from llmc.graph.stored_codes import RoundedAgain, StoredWeight, UnpackedCodes

FILE = "weights.npz"
_CODES, _SCALES = ".codes", ".scales"


class NpzSource:
    """The tensors of an archive; a CodeSource."""

    is_quantized, gives_way = True, False
    notes: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with np.load(directory / FILE) as archive:
            self._tensors = {name: torch.from_numpy(archive[name]) for name in archive.files}
        self._coded = {name.removesuffix(_CODES) for name in self._tensors if name.endswith(_CODES)}

    def names(self) -> tuple[str, ...]:
        plain = {name for name in self._tensors if not name.endswith((_CODES, _SCALES))}
        return tuple(sorted(plain | self._coded))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stored(name + _CODES if name in self._coded else name).shape)

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        if self.shape(name) != shape:
            raise CheckpointError(f"tensor {name!r} is {list(self.shape(name))}, not {list(shape)}", at=self.directory)

    def load(self, name: str) -> Tensor:
        base, _, part = name.partition("::")
        if base not in self._coded:
            return self._stored(name)
        unpacked = self.unpacked(base)
        return unpacked.values("int8") if not part else unpacked.codes if part == "codes" else unpacked.scales

    def dtype(self) -> torch.dtype:
        return torch.float32

    def headers(self) -> list[tuple[object, ...]]:
        return [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in sorted(self._tensors.items())]

    def weight(self, name: str) -> StoredWeight | None:
        if name not in self._coded:
            return None
        rows, columns = self.shape(name)
        return StoredWeight(name, (rows, columns), "npz", "int8")

    def rounded(self, name: str) -> RoundedAgain | None:
        return None

    def are_alike(self, names: Sequence[str]) -> bool:
        return set(names) <= self._coded and len({self.shape(name)[1] for name in names}) == 1

    def unpacked(self, name: str) -> UnpackedCodes:
        return UnpackedCodes(self._stored(name + _CODES), self._stored(name + _SCALES), zeros=None)

    def input_scale(self, name: str) -> Tensor | None:
        return None

    def _stored(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"the archive has no tensor {name!r}", at=self.directory / FILE)
        return self._tensors[name]


NPZ = model_directory("npz", lambda path: (path / FILE).is_file(), NpzSource)
