"""Checkpoints whose weights are codes, as they are on the Hub: docs/quantization.md lists the formats.

A QuantizedSource shows each quantized weight under the model's name, with its true shape, and in addition
`NAME::codes`, `NAME::scales`, `NAME::zeros` and `NAME::order`, so that codes go into an engine as they are.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.find_weights import find_weights
from llmc.frontends.checkpoints.codes.packed_weight import PackedWeight
from llmc.frontends.checkpoints.codes.quantization_config import quantization_of, stored_quantization
from llmc.frontends.checkpoints.safetensors import HidingSource, SafetensorsSource, check_shape
from llmc.frontends.checkpoints.safetensors_header import TensorEntry
from llmc.graph.stored_codes import RoundedAgain, StoredWeight, UnpackedCodes

_PARTS = ("codes", "scales", "zeros", "order")


class QuantizedSource(HidingSource):
    """The tensors of a quantized checkpoint; a CodeSource. Opening reads headers and what describes the codes.

    Raises CheckpointError for a format that is not read, and for quantized tensors that are not complete.
    """

    def __init__(self, directory: Path) -> None:
        files = SafetensorsSource(directory)
        stated = quantization_of(directory)
        if stated is None:
            raise CheckpointError("no file says that the weights are codes", at=directory)
        stored = stored_quantization(*stated)
        self._weights, unused = find_weights(files, stored)
        hidden = {name for weight in self._weights.values() for name in weight.parts.names.values()} | unused
        hidden |= {weight.input_scale for weight in self._weights.values() if weight.input_scale is not None}
        super().__init__(files, {name: weight.model_shape for name, weight in self._weights.items()}, hidden)
        self.notes = (*files.notes, *stored.notes)
        # Codes, scales and zeros of one weight are requested consecutively.
        self.unpacked = functools.lru_cache(maxsize=1)(self._unpack)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is codes."""
        return bool(self._weights)

    @property
    def gives_way(self) -> bool:
        """False: codes stay as they are, whatever `quantize` says of other weights."""
        return False

    def weight(self, name: str) -> StoredWeight | None:
        """Return how the weight's codes are stored; None if it is not quantized."""
        packed = self._weights.get(name)
        if packed is None:
            return None
        scheme = packed.scheme
        return StoredWeight(name, packed.shape, scheme.method, scheme.format, scheme.activation)

    def rounded(self, name: str) -> RoundedAgain | None:
        """Return None, because all formats that are read are codes."""

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        weight = self._weights.get(name)
        if weight is None:
            self.files.check(name, shape, floating=floating)
        else:
            check_shape(name, weight.model_shape, shape, self._entry(weight).file)

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU: dequantized to fp32 if it is a quantized weight, or the part of one that is named."""
        base, _, part = name.partition("::")
        if base not in self._weights:
            return self.files.load(name)
        unpacked = self.unpacked(base)
        if not part:
            weight = self._weights[base]
            return weight.as_model_has_it(unpacked.values(weight.scheme.format))
        values: Tensor | None = getattr(unpacked, part) if part in _PARTS else None
        if values is None:
            raise CheckpointError(f"weight {base!r} has no {part}", at=self.directory, fix="compile the model again")
        return values

    def are_alike(self, names: Sequence[str]) -> bool:
        """Whether the weights' codes can be the rows of one matrix. They must have one scheme and shape, all have zeros
        or none, keep the order of their columns, and lack scales of activations."""
        weights = [self._weights.get(name) for name in names]
        known = [
            weight for weight in weights if weight is not None and weight.experts is None and weight.input_scale is None
        ]
        if len(known) != len(weights) or any(weight.has_order() for weight in known):
            return False
        return len({(weight.scheme, weight.shape, weight.stored_shapes, weight.has_zeros()) for weight in known}) == 1

    def input_scale(self, name: str) -> Tensor | None:
        """The static scale of a weight's activations, [1] in fp32; None if it has none."""
        scale = self._weights[name].input_scale
        return None if scale is None else self.files.load(scale).float().reshape(1)

    def _entry(self, weight: PackedWeight) -> TensorEntry:
        return self.files.entry(next(iter(weight.parts.names.values())))

    def _unpack(self, name: str) -> UnpackedCodes:
        """Return all parts of a quantized weight."""
        weight = self._weights[name]
        try:
            return weight.unpacked()
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the codes of {name!r} do not fit together: {error}",
                at=self._entry(weight).file,
                fix="check that config.json belongs to these weights",
            ) from None
