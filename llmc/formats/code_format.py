"""Formats of the codes that numbers are rounded to: one record each, read by schemes, ops, costs and all backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Activation = Literal["none", "int8", "fp8"]
Granularity = Literal["tensor", "channel", "group", "block"]

# Quantiles of a normal distribution scaled to [-1, 1]. Source: Dettmers et al. 2023, "QLoRA", appendix E.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Source: Open Compute Project, "Microscaling formats (MX) specification" 1.0.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class CodeFormat:
    """Codes of `bits` bits; what they stand for is in ops/weight_codes.py.

    largest: what a symmetric scale makes of the largest magnitude. activations: what tokens may be rounded to in
    products with such weights. granularities: that schemes may choose. integers: the smallest and the largest code,
    with `balanced` where a symmetric scale uses as many below zero as above; None where codes are the bits of
    something else: of the number's place in a table, else of e4m3fn. power_of_two: whether scales are.
    """

    bits: int
    largest: float
    activations: tuple[Activation, ...] = ("none",)
    granularities: tuple[Granularity, ...] = ()
    integers: tuple[int, int] | None = None
    balanced: bool = False
    table: tuple[float, ...] | None = None
    power_of_two: bool = False

    @property
    def symmetric(self) -> tuple[int, int]:
        """The smallest and the largest integer code of a weight without zeros."""
        assert self.integers is not None, "the codes are no integers"
        low, high = self.integers
        return (-high if self.balanced else low), high

    @property
    def in_planes(self) -> bool:
        """Whether codes are stored in two parts: the low four bits as codes of four are, the others apart."""
        return self.bits in (5, 6)

    @property
    def unsigned_shift(self) -> int:
        """What is added to codes, and their zeros, so that none is negative."""
        return 0 if self.integers is None else -self.integers[0]


# As LlmcCodes of codegen/cpp/kernels/api.h numbers them.
CODE_FORMATS: Mapping[str, CodeFormat] = MappingProxyType(
    {
        "int8": CodeFormat(8, 127.0, ("none", "int8"), ("group", "channel"), (-128, 127), balanced=True),
        "int4": CodeFormat(4, 7.5, ("none", "int8"), ("group", "channel"), (-8, 7)),
        "fp8": CodeFormat(8, 448.0, ("none", "fp8"), ("group", "channel", "tensor", "block")),
        "nf4": CodeFormat(4, 1.0, granularities=("group",), table=_NF4),
        "mxfp4": CodeFormat(4, 6.0, table=_E2M1, power_of_two=True),
        "int5": CodeFormat(5, 15.5, ("none", "int8"), ("group", "channel"), (-16, 15)),
        "int6": CodeFormat(6, 31.5, ("none", "int8"), ("group", "channel"), (-32, 31)),
    }
)
