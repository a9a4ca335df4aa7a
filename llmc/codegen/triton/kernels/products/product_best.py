"""lm_head with argmax: each row's largest logit and its token, without ever writing the logits.

The products of product_gemv and product_narrow, tile for tile and sum for sum, so that the token is the one that the
logits would give. Instead of its tile a program leaves the tile's largest logit of each row, and where it is; the
second launch of draw_rows joins them. Reads W once and writes 8·L bytes a program, where the logits would take 4·L·V.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.products.dense_gemv import gemv_sums
from llmc.codegen.triton.kernels.products.dense_narrow import narrow_sums
from llmc.codegen.triton.machine_code.budget import EDGE_FREE, STREAMING, Budget

_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_gemv_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program j: BLOCKS times OUT_BLOCK outputs of all TOKENS tokens, one block after the other. Grid: (CHUNKS)."""
    token, out = tl.arange(0, TOKENS), tl.arange(0, OUT_BLOCK)
    largest = tl.full([TOKENS], float("-inf"), tl.float32)
    place = tl.full([TOKENS], _LAST, tl.int32)
    first_token = tl.program_id(0).to(tl.int64) * 0
    for index in range(BLOCKS):
        # Blocks past the end read the last row and find nothing that is larger.
        block = tl.program_id(0) * BLOCKS + index
        first_out = (first_token + block) * OUT_BLOCK
        logits, _ = gemv_sums(
            x_ptr, x_row_stride, weight_ptr, None, None, None, 0.0, first_token, first_out, tokens,
            IN, OUT, False, False, TOKENS, OUT_BLOCK, IN_BLOCK, AHEAD, LINES_AHEAD,
        )  # fmt: skip
        best, where = _best_of_tile(logits, (block * OUT_BLOCK + out)[None, :], bias_ptr, OUT, 1)
        # An equal one in a later block has a higher index.
        is_better = (best > largest) | ((best == largest) & (where < place))
        largest, place = tl.where(is_better, best, largest), tl.where(is_better, where, place)
    chunk = token * CHUNKS + tl.program_id(0)
    tl.store(maxima_ptr + chunk, largest, mask=token < tokens)
    tl.store(places_ptr + chunk, place, mask=token < tokens)


@triton.jit
def best_narrow_kernel(
    x_ptr: tl.tensor,
    x_row_stride: int,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    tokens: int,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (j, i): the j-th OUT_BLOCK outputs of the i-th TOKEN_BLOCK tokens. Grid: (CHUNKS, token tiles)."""
    token, out = tl.arange(0, TOKEN_BLOCK), tl.arange(0, OUT_BLOCK)
    first_out, first_token = tl.program_id(0).to(tl.int64) * OUT_BLOCK, tl.program_id(1).to(tl.int64) * TOKEN_BLOCK
    logits, _ = narrow_sums(
        x_ptr, x_row_stride, weight_ptr, None, None, None, 0.0, first_token, first_out, 0, tokens,
        IN, OUT, False, False, TOKEN_BLOCK, OUT_BLOCK, IN_BLOCK, 1, LINES_AHEAD,
    )  # fmt: skip
    index = tl.program_id(0) * OUT_BLOCK + out
    largest, place = _best_of_tile(logits, index[:, None], bias_ptr, OUT, 0)
    chunk = (first_token + token) * CHUNKS + tl.program_id(0)
    tl.store(maxima_ptr + chunk, largest, mask=first_token + token < tokens)
    tl.store(places_ptr + chunk, place, mask=first_token + token < tokens)


@triton.jit
def _best_of_tile(
    logits: tl.tensor, index: tl.tensor, bias_ptr: tl.tensor, OUT: tl.constexpr, AXIS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Along an axis, the largest logit with its bias, and the lowest index of one so large; NaN counts as infinite."""
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + index, mask=index < OUT, other=0.0)
    logits = tl.where(logits != logits, float("inf"), logits)
    logits = tl.where(index < OUT, logits, float("-inf"))
    largest = tl.max(logits, axis=AXIS)
    is_largest = logits == tl.expand_dims(largest, AXIS)
    return largest, tl.min(tl.where(is_largest, index, _LAST), axis=AXIS)


best_gemv_budget = Budget("best_gemv_kernel", (*STREAMING, *EDGE_FREE), streams=("weight_ptr",))
best_narrow_budget = Budget("best_narrow_kernel", (*STREAMING, *EDGE_FREE), streams=("weight_ptr",))
