"""Formats of the codes that numbers are rounded to: one record each, read by schemes, ops, costs and all backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Activation = Literal["none", "int8", "fp8"]
Granularity = Literal["tensor", "channel", "group", "block"]

# The tensors of a weight in codes, in the order of llmc::dequantize's arguments.
CODE_PARTS = ("codes", "scales", "zeros", "scale_steps", "minima", "minimum_steps")
STEP_PARTS = ("scale_steps", "minimum_steps")

# A run of columns that share a float is a multiple of this, in blocked formats.
RUN_UNIT = 32
# Channels of a token that share a scale, where tokens are rounded by groups.
TOKEN_GROUP = 32

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


# Source: ggml-common.h of llama.cpp, kvalues_iq4nl.
_IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


@dataclass(frozen=True)
class Steps:
    """Small integers, one per group, that multiply a float shared by several groups.

    bits: bits of a stored integer. least: the smallest integer, which is stored as 0. groups: number of groups that
    share a float.
    """

    bits: int
    least: int
    groups: int


@dataclass(frozen=True)
class CodeFormat:
    """Codes of `bits` bits; what they stand for is in ops/weight_codes.py.

    largest: the code that a symmetric scale maps the largest magnitude to. activations: formats of rounded tokens in
    products with such weights. granularities: those that schemes may choose. integers: the smallest and the largest
    code, with `balanced` if a symmetric scale uses equal numbers of codes below and above zero; None if codes are
    indices into a table, or bits of e4m3fn. power_of_two: whether scales are powers of two. group: number of columns
    that share a scale, if the format fixes it. steps: those of its scales, if a scale is a float times a small integer;
    minima then also have steps with this number of bits, from 0 on. has_minimum: whether each group has a number that
    is subtracted.
    """

    bits: int
    largest: float
    activations: tuple[Activation, ...] = ("none",)
    granularities: tuple[Granularity, ...] = ()
    integers: tuple[int, int] | None = None
    balanced: bool = False
    table: tuple[float, ...] | None = None
    power_of_two: bool = False
    group: int | None = None
    steps: Steps | None = None
    has_minimum: bool = False

    @property
    def symmetric(self) -> tuple[int, int]:
        """The smallest and the largest integer code of a weight without zeros."""
        assert self.integers is not None, "the codes are not integers"
        low, high = self.integers
        return (-high if self.balanced else low), high

    @property
    def planes(self) -> tuple[int, ...]:
        """The number of bits of a code in each plane, from the low ones on: 4 and the rest for codes of 5 and 6
        bits."""
        return {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(self.bits, (self.bits,))

    @property
    def in_planes(self) -> bool:
        """Whether codes lie in units of 32: several planes, or of fewer than four bits."""
        return self.bits not in (4, 8)

    @property
    def is_blocked(self) -> bool:
        """Whether scales are more than a float per group: they have steps or minima, or multiply integers of a table.
        The format then fixes the number of columns that share a scale."""
        return self.group is not None

    @property
    def run(self) -> int | None:
        """The number of columns that share a float in a GGUF file; None if the format leaves it open."""
        return None if self.group is None else self.group * (1 if self.steps is None else self.steps.groups)

    def run_of(self, columns: int) -> int | None:
        """The number of columns that share a float in rows that are rounded to the format.

        Returns:
            `run` if it divides the row, else the smallest larger number that does, at most the whole row. None if the
            row is not a multiple of 32 columns, or the format leaves the number open.
        """
        if self.run is None or columns % RUN_UNIT:
            return None
        least = min(self.run, columns)
        return next(run for run in range(least, columns + 1, RUN_UNIT) if columns % run == 0)

    def step_bits(self, run: int) -> int:
        """Bits of the stored steps of a run of columns, a multiple of 16."""
        if self.steps is None or self.group is None:
            return 0
        return -(-self.steps.bits * (run // self.group) * (1 + self.has_minimum) // 16) * 16

    @property
    def step_field_bits(self) -> int:
        """Bits of the steps of one group, of its scale and of its minimum; 0 if there are none."""
        return 0 if self.steps is None else self.steps.bits * (1 + self.has_minimum)

    @property
    def unsigned_shift(self) -> int:
        """The offset added to codes and zeros, so that none is negative."""
        return 0 if self.integers is None else -self.integers[0]


_BY_GROUP: tuple[Activation, ...] = ("none", "int8")


def _blocked(bits: int, low: int, group: int, *, steps: Steps | None = None, minimum: bool = False) -> CodeFormat:
    """Integers from `low` on, as GGUF files have them."""
    high = low + (1 << bits) - 1
    largest = float(high if minimum else -low)
    return CodeFormat(bits, largest, _BY_GROUP, (), (low, high), group=group, steps=steps, has_minimum=minimum)


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
        "q4_1": _blocked(4, 0, 32, minimum=True),
        "q5_1": _blocked(5, 0, 32, minimum=True),
        "q2_k": _blocked(2, 0, 16, steps=Steps(4, 0, 16), minimum=True),
        "q3_k": _blocked(3, -4, 16, steps=Steps(6, -32, 16)),
        "q4_k": _blocked(4, 0, 32, steps=Steps(6, 0, 8), minimum=True),
        "q5_k": _blocked(5, 0, 32, steps=Steps(6, 0, 8), minimum=True),
        "q6_k": _blocked(6, -32, 16, steps=Steps(8, -128, 16)),
        "iq4_nl": CodeFormat(4, 127.0, _BY_GROUP, table=_IQ4, group=32),
        "iq4_xs": CodeFormat(4, 127.0, _BY_GROUP, table=_IQ4, group=32, steps=Steps(6, -32, 8)),
    }
)
