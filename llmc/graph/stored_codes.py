"""Weights that a checkpoint holds as codes: how passes see them, whatever file they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS
from llmc.formats.schemes import Scheme
from llmc.graph.code_numbers import weight_values
from llmc.graph.weights import WeightSource


@dataclass(frozen=True)
class StoredWeight:
    """A weight stored as codes.

    shape: [out, in]. method: what quantized it, for reports. format: the format of the codes, a key of CODE_FORMATS.
    activation: the format that tokens are rounded to: none, int8 or fp8. token_group: channels of a token that share a
    scale; None for all.
    """

    name: str
    shape: tuple[int, int]
    method: str
    format: str
    activation: str = "none"
    token_group: int | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODE_FORMATS[self.format].bits

    @property
    def label(self) -> str:
        """Method, format and activations as text."""
        by = "" if self.token_group is None else f" by {self.token_group}"
        rounded = "" if self.activation == "none" else f", {self.activation} activations{by}"
        is_named = CODE_FORMATS[self.format].is_blocked  # By the type that it comes from.
        return f"{self.method}{'' if is_named else f' {self.format}'}{rounded}"


@dataclass(frozen=True)
class RoundedAgain:
    """A weight stored in blocks that no code format represents exactly.

    type: the name of the blocks' type. scheme: what the weight is rounded to.
    """

    name: str
    type: str
    scheme: Scheme


@dataclass(frozen=True)
class UnpackedCodes:
    """codes int8 [out, in], or uint8 with the bits of e4m3fn or e2m1; zeros int8, or None if all are the middle of the
    range.

    order: the input channel that each column belongs to, int64 [in], where columns are sorted by their group; None if
    they are in place. scale_steps, minima, minimum_steps: as in ops/weight_codes.py, where the format has them.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None = None
    scale_steps: Tensor | None = None
    minima: Tensor | None = None
    minimum_steps: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors, by the names of llmc::dequantize's arguments."""
        return {name: part for name in CODE_PARTS if (part := getattr(self, name)) is not None}

    def values(self, format: str) -> Tensor:
        """The weight [out, in] that they stand for, fp32, its columns in place."""
        parts = (self.scale_steps, self.minima, self.minimum_steps)
        values = weight_values(self.codes, self.scales, self.zeros, format, *parts)
        if self.order is None:
            return values
        in_place = torch.empty_like(values)
        in_place[:, self.order] = values
        return in_place


@runtime_checkable
class CodeSource(WeightSource, Protocol):
    """A WeightSource that may hold weights as codes. Parts of a coded weight load as `NAME::codes`, `NAME::scales` and
    so on, by the names of CODE_PARTS; `NAME` loads the numbers that the codes stand for."""

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is stored as codes."""

    @property
    def gives_way(self) -> bool:
        """Whether the build option `quantize` takes precedence over the stored codes."""

    def weight(self, name: str) -> StoredWeight | None:
        """Return how the codes of a weight are stored; None for a weight without codes that can be kept."""

    def rounded(self, name: str) -> RoundedAgain | None:
        """The codes to which a weight in unsupported blocks is rounded; None for any other weight."""

    def are_alike(self, names: Sequence[str]) -> bool:
        """Whether the weights' codes can be rows of one matrix: equally many columns, and codes of one kind."""

    def unpacked(self, name: str) -> UnpackedCodes:
        """Return all parts of a weight of codes, or their shapes and dtypes on torch's meta device."""

    def input_scale(self, name: str) -> Tensor | None:
        """The static scale of a weight's activations, [1] in fp32; None if the checkpoint holds none."""
