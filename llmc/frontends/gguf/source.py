"""The tensors of a GGUF file as a WeightSource: under the model's names, put back as they were before conversion."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.formats.scheme_text import parse_scheme
from llmc.frontends.checkpoints.safetensors import check_shape
from llmc.frontends.gguf.architectures import described
from llmc.frontends.gguf.block_codes import NUMBERS, decoded, unpack_blocks
from llmc.frontends.gguf.byte_reader import DOWNLOAD_AGAIN
from llmc.frontends.gguf.container import read_bytes, read_model
from llmc.frontends.gguf.description import dtype_name
from llmc.frontends.gguf.files import gguf_files
from llmc.frontends.gguf.placement import Place
from llmc.graph.dtype_names import NAMED_DTYPES
from llmc.graph.stored_codes import RoundedAgain, StoredWeight, UnpackedCodes


class GgufSource:
    """The tensors of a directory that links to a GGUF file; a CodeSource. Opening reads headers only.

    Raises CheckpointError for a file that is damaged, or of another model than config.json's.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._model = read_model(gguf_files(directory))
        _, self._places = described(self._model)
        # Codes and scales of one weight are requested consecutively.
        self._unpacked = functools.lru_cache(maxsize=1)(self._unpack)

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is in blocks of codes."""
        return any(place.tensor.type.is_quantized for place in self._places.values())

    @property
    def gives_way(self) -> bool:
        """True: most files are quantized, and `quantize` may ask for something else."""
        return True

    def names(self) -> tuple[str, ...]:
        """The tensors as the model knows them, sorted."""
        return tuple(sorted(self._places))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises CheckpointError if there is none of that name."""
        return self._place(name).shape

    def headers(self) -> list[tuple[object, ...]]:
        """Names, types and shapes of the tensors."""
        return [(name, place.tensor.type.name, place.shape) for name, place in sorted(self._places.items())]

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        """Check a tensor's shape, like SafetensorsSource.check. All types of GGUF stand for numbers."""
        place = self._place(name)
        check_shape(name, place.shape, shape, place.tensor.file)

    def dtype(self) -> torch.dtype:
        """The dtype of most numbers; bfloat16 if they are codes."""
        return NAMED_DTYPES[dtype_name(self._model)]

    def weight(self, name: str) -> StoredWeight | None:
        """Return how the codes of a matrix are stored; None for other tensors, and for codes that cannot be kept."""
        place = self._place(name)
        kind = place.tensor.type
        if kind.codes is None or not _is_matrix(place):
            return None
        columns = place.rows_shape[-1]
        return StoredWeight(name, (math.prod(place.shape) // columns, columns), kind.name, kind.codes)

    def rounded(self, name: str) -> RoundedAgain | None:
        """The codes to which a matrix in unsupported blocks is rounded; None for any other."""
        place = self._place(name)
        kind = place.tensor.type
        scheme = None if kind.rounded is None or not _is_matrix(place) else parse_scheme(kind.rounded)
        return None if scheme is None else RoundedAgain(name, kind.name, scheme)

    def are_alike(self, names: Sequence[str]) -> bool:
        """Whether the matrices have equally many columns, in blocks of one type."""
        places = [self._place(name) for name in names]
        return len({(place.shape[-1], place.tensor.type.name) for place in places}) == 1

    def unpacked(self, name: str) -> UnpackedCodes:
        """Return all parts of a matrix of codes, on torch's meta device: their shapes and dtypes."""
        place = self._place(name)
        return _unpacked(place, torch.empty(place.nbytes, dtype=torch.uint8, device="meta"))

    def input_scale(self, name: str) -> Tensor | None:
        """Return None, because files do not say how activations are rounded."""

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, fp32 if it is stored in blocks; or of such a matrix the part after `::`."""
        base, _, part = name.partition("::")
        place = self._place(base)
        kind = place.tensor.type
        if part:
            return self._unpacked(base).parts()[part]
        if kind.codes is not None:
            return _as_model_has_it(self._unpacked(base).values(kind.codes), place)
        data = _bytes_of(place)
        if kind.name in NUMBERS:
            values = torch.frombuffer(data, dtype=NUMBERS[kind.name])
        else:
            values = decoded(data, kind, place.rows_shape[-1])
            self._check_finite(place, {"values": values})
        values = _in_halves(_as_model_has_it(values, place), place.heads)
        return values - place.less if place.less else values

    def _unpack(self, name: str) -> UnpackedCodes:
        place = self._place(name)
        unpacked = _unpacked(place, torch.frombuffer(_bytes_of(place), dtype=torch.uint8))
        self._check_finite(place, unpacked.parts())
        return replace(unpacked, **{part: _in_halves(values, place.heads) for part, values in unpacked.parts().items()})

    def _check_finite(self, place: Place, parts: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError for scales, minima or values that are NaN or infinite. parts: [rows, columns]."""
        blocks = place.rows_shape[-1] // place.tensor.type.elements
        for name, part in parts.items():
            if not part.is_floating_point() or bool(part.isfinite().all()):
                continue
            wrong = (~part.isfinite()).nonzero()
            row, column = map(int, wrong[0])
            block = column * blocks // part.shape[1]
            raise CheckpointError(
                f"damaged GGUF file: tensor {place.tensor.name}, of type {place.tensor.type.name}, has {len(wrong)} "
                f"{name} that are not finite, the first {float(part[row, column])} in row {row}, block {block}",
                at=place.tensor.file,
                fix=DOWNLOAD_AGAIN,
            )

    def _place(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(
                f"the file has no tensor for {name!r} ({len(self._places)} tensors found)",
                at=self._model.path,
                fix="download the file again, and all of them if the model is split",
            )
        return place


def _unpacked(place: Place, data: Tensor) -> UnpackedCodes:
    """Return the codes, with rows in the order of the file."""
    return unpack_blocks(data, place.tensor.type, place.rows_shape[-1])


def _is_matrix(place: Place) -> bool:
    return len(place.shape) == 2 or place.is_transposed


def _as_model_has_it(values: Tensor, place: Place) -> Tensor:
    """values: in the order of rows."""
    shaped = values.view(place.rows_shape)
    return shaped.transpose(1, 2) if place.is_transposed else shaped


def _bytes_of(place: Place) -> bytearray:
    """The bytes of a tensor, or of one of its experts."""
    if place.between is None:
        return read_bytes(place.tensor, place.nbytes * (place.expert or 0), place.nbytes)
    rows = math.prod(place.tensor.shape[:2])
    halves = (torch.frombuffer(read_bytes(tensor), dtype=torch.uint8) for tensor in (place.tensor, place.between))
    return bytearray(torch.stack([half.view(rows, -1) for half in halves], 1).numpy().tobytes())


def _in_halves(rows: Tensor, heads: int | None) -> Tensor:
    """The rows of each head with pairs side by side → first all of the one, then all of the other."""
    if heads is None:
        return rows
    paired: Tensor = rows.view(heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
