"""A weight of codes as the files of a checkpoint hold it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.frontends.checkpoints.codes.layouts import zero_offset
from llmc.frontends.checkpoints.codes.stored_scheme import StoredParts, StoredScheme
from llmc.frontends.checkpoints.codes.unpack_codes import are_middle
from llmc.graph.stored_codes import UnpackedCodes

# The bits of e4m3's NaN without its sign.
_NAN = 0x7F
_ZEROS, _ORDERS = ("qzeros", "weight_zero_point"), ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight of a checkpoint.

    Args:
        name: that the model has for it.
        shape: [out, in].
        parts: its tensors.
        scheme: how they are to be read.
        input_scale: the name of the static scale of its activations, where those are rounded with it.
        experts: number of experts of a weight that the model has as [experts, in, out / experts]; its rows are those of
            one expert after another.
    """

    name: str
    shape: tuple[int, int]
    parts: StoredParts
    scheme: StoredScheme
    input_scale: str | None
    experts: int | None = None

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The weight's shape in the model."""
        rows, columns = self.shape
        return self.shape if self.experts is None else (self.experts, columns, rows // self.experts)

    @property
    def stored_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The shapes of its tensors, by suffix."""
        return tuple((suffix, self.parts.shape(suffix)) for suffix in sorted(self.parts.names))

    def as_model_has_it(self, values: Tensor) -> Tensor:
        """Turn stored values [out, in] into the shape of the model's tensor."""
        return values if self.experts is None else values.unflatten(0, (self.experts, -1)).transpose(1, 2)

    def has_zeros(self) -> bool:
        """Whether zeros are stored that are not the middle of the range."""
        suffix = next((ending for ending in _ZEROS if ending in self.parts), None)
        if suffix is None:
            return False
        zeros = self.parts.load(suffix)
        bits = self.scheme.bits if zeros.dtype is torch.int32 else None
        return not are_middle(zeros, bits, zero_offset(zeros, self.scheme))

    def has_order(self) -> bool:
        """Whether columns are stored in another order than the model's."""
        suffix = next((ending for ending in _ORDERS if ending in self.parts), None)
        return suffix is not None and bool((self.parts.load(suffix).diff() < 0).any())

    def unpacked(self) -> UnpackedCodes:
        """Return codes, scales and zeros. Raises ValueError for tensors that do not fit together, and for scales that
        are NaN or infinite."""
        unpacked = self.scheme.layout.unpack(self.parts, self.shape, self.scheme)
        (rows, columns), scales = self.shape, tuple(unpacked.scales.shape)
        if tuple(unpacked.codes.shape) != self.shape:
            raise ValueError(f"they are {list(unpacked.codes.shape)}, and the weight is {list(self.shape)}")
        if len(scales) != 2 or scales[0] != rows or not scales[1] or columns % scales[1]:
            raise ValueError(f"the scales are {list(scales)}, and the weight is {list(self.shape)}")
        if unpacked.zeros is not None and tuple(unpacked.zeros.shape) != scales:
            raise ValueError(f"the zeros are {list(unpacked.zeros.shape)}, and the scales {list(scales)}")
        bad = int((~unpacked.scales.float().isfinite()).sum())
        if bad:
            raise ValueError(f"{bad} of {unpacked.scales.numel()} scales ({unpacked.scales.dtype}) are NaN or infinite")
        if self.scheme.format == "fp8" and bool(((unpacked.codes & _NAN) == _NAN).any()):
            raise ValueError("some of them are NaN")
        return unpacked
