"""The choices that define how a matrix product is computed: its kernel and the sizes of its tiles."""

from dataclasses import dataclass
from enum import Enum

import triton

# The maximum number of rows of x for GEMV kernels, and for kernels that split sums.
MOST_GEMV_ROWS, MOST_SPLIT_ROWS = 4, 256


class Way(Enum):
    """Which kernel computes a product; its file has the name. LIBRARY: of program/library_products.py, and a finish."""

    DENSE_GEMV = "dense_gemv"
    DENSE_NARROW = "dense_narrow"
    DENSE_TILE = "dense_tile"
    DENSE_PERSISTENT = "dense_persistent"
    CODED_GEMV = "coded_gemv"
    CODED_NARROW = "coded_narrow"
    CODED_TILE = "coded_tile"
    LIBRARY = "library"


@dataclass(frozen=True)
class Tiling:
    """One way to compute a product, and how it is cut. efficiency: the share of the peak rate that its loop reaches.

    in_block: of CODED_NARROW, channels that a warp loads at once. normed: the kernel norms x itself; otherwise a launch
    before it does, where there is a norm. expanded: of a weight that a launch before writes to a workspace (product.py,
    Expansion), not of the weight as it is stored. as_numbers: of rounded tokens as numbers (product.py, Codes).
    """

    way: Way
    token_block: int
    out_block: int
    in_block: int
    num_warps: int
    num_stages: int
    efficiency: float
    splits: int = 1
    normed: bool = False
    expanded: bool = False
    as_numbers: bool = False


def token_block(tokens: int, most: int) -> int:
    """Rows of x in a tile for this number of tokens: a power of two from 16, as matrix units require, to `most`."""
    return int(min(most, max(16, triton.next_power_of_2(tokens))))
