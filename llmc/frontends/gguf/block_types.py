"""The types of GGUF tensors: their blocks of weights, and the formats that engines store them in.

Numbers and sizes are ggml's. Engines store types with `codes` exactly. A type without them is rounded again to
`rounded`, which has about one bit more than the type and so adds at most about half of the existing error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockType:
    """A tensor type of GGUF. number: the type's number in files. elements, nbytes: size of a block. codes: the code
    format that represents its blocks exactly. rounded: the scheme that rounds them where no format does. Both are None
    for plain numbers."""

    name: str
    number: int
    elements: int
    nbytes: int
    codes: str | None = None
    rounded: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether its elements are codes of some kind."""
        return self.codes is not None or self.rounded is not None

    @property
    def bits(self) -> float:
        """Bits per element, including scales."""
        return 8 * self.nbytes / self.elements


_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("BF16", 30, 1, 2),
    BlockType("F64", 28, 1, 8),
    BlockType("Q4_0", 2, 32, 18, codes="int4"),
    BlockType("Q5_0", 6, 32, 22, codes="int5"),
    BlockType("Q8_0", 8, 32, 34, codes="int8"),
    BlockType("MXFP4", 39, 32, 17, codes="mxfp4"),
    BlockType("Q4_1", 3, 32, 20, codes="q4_1"),
    BlockType("Q5_1", 7, 32, 24, codes="q5_1"),
    BlockType("Q2_K", 10, 256, 84, codes="q2_k"),
    BlockType("Q3_K", 11, 256, 110, codes="q3_k"),
    BlockType("Q4_K", 12, 256, 144, codes="q4_k"),
    BlockType("Q5_K", 13, 256, 176, codes="q5_k"),
    BlockType("Q6_K", 14, 256, 210, codes="q6_k"),
    BlockType("IQ1_S", 19, 256, 50, rounded="int4:g32:asym"),
    BlockType("IQ1_M", 29, 256, 56, rounded="int4:g32:asym"),
    BlockType("IQ2_XXS", 16, 256, 66, rounded="int5:g32:asym"),
    BlockType("IQ2_XS", 17, 256, 74, rounded="int5:g32:asym"),
    BlockType("IQ2_S", 22, 256, 82, rounded="int5:g32:asym"),
    BlockType("IQ3_XXS", 18, 256, 98, rounded="int5:g32:asym"),
    BlockType("IQ3_S", 21, 256, 110, rounded="int5:g32:asym"),
    BlockType("IQ4_NL", 20, 32, 18, codes="iq4_nl"),
    BlockType("IQ4_XS", 23, 256, 136, codes="iq4_xs"),
    BlockType("TQ1_0", 34, 256, 54, rounded="int8:g32"),
    BlockType("TQ2_0", 35, 256, 66, rounded="int8:g32"),
)
BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType({kind.number: kind for kind in _TYPES})
