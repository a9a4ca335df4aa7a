"""Device code for matrix products whose operands are in the registers of chosen threads (mma.sync).

All tensors are of 32·WARPS elements, one of each thread, so that a kernel knows which thread holds what: thread 4·g + t
of a warp has row g of the left operand and of its sums, column g of the right one, and channels t of both. Words are
int32 with two numbers of 16 bits.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED

_BF16_SUMS = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_FP16_SUMS = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_REGISTERS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
_ISSUE_LOADS = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")


@triton.jit
def words_of_rows(
    pointers: tl.tensor, inside: tl.tensor, COUNT: tl.constexpr, IS_WHOLE: tl.constexpr, POLICY: tl.constexpr
) -> tl.tuple:
    """COUNT words, one, two or four, from each pointer on, a multiple of their size. Without IS_WHOLE, zeros where
    `inside` is false."""
    words = pointers.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, COUNT)[None, :]
    words = tl.multiple_of(words, [4 * COUNT, 4 * COUNT])
    if IS_WHOLE:
        found = tl.load(words, eviction_policy=POLICY)
    else:
        found = tl.load(words, mask=inside[:, None], other=0, eviction_policy=POLICY)
    if COUNT == 1:
        return (found.reshape(pointers.shape[0]),)
    elif COUNT == 2:
        return found.split()
    else:
        even, odd = found.reshape(pointers.shape[0], 2, 2).split()
        first, third = even.split()
        second, fourth = odd.split()
        return first, second, third, fourth


@triton.jit
def issue_loads(any_word: tl.tensor) -> None:
    """Have the loads before issued here: the assembler moves loads down to where they are used, but not across a
    barrier of the warp."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(_ISSUE_LOADS, "=r,r", [any_word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def matrix_sums(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    sums: tl.tuple,
    IS_BF16: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """sums + a·b of 16 rows, 16 channels and 8 columns.

    a0, a2: of rows g; a1, a3: of rows 8 + g. a0, a1, b0: of the first channels; a2, a3, b1: of the last ones. sums: of
    row g, columns 2·t and 2·t + 1; then of row 8 + g.
    """
    if INTERPRETED:
        low = _pair_products(a0, b0, IS_BF16, WARPS) + _pair_products(a2, b1, IS_BF16, WARPS)
        high = _pair_products(a1, b0, IS_BF16, WARPS) + _pair_products(a3, b1, IS_BF16, WARPS)
        first, second = low.reshape(32 * WARPS, 2).split()
        third, fourth = high.reshape(32 * WARPS, 2).split()
        return sums[0] + first, sums[1] + second, sums[2] + third, sums[3] + fourth
    else:
        return tl.inline_asm_elementwise(
            _BF16_SUMS if IS_BF16 else _FP16_SUMS,
            _REGISTERS,
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _pair_products(a: tl.tensor, b: tl.tensor, IS_BF16: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """a·b of 8 rows, 8 channels and 8 columns, [WARPS, 8, 8]."""
    total = tl.zeros([WARPS, 8, 8], tl.float32)
    for half in tl.static_range(2):
        left = half_of_word(a, half, IS_BF16).reshape(WARPS, 8, 1, 4)
        total += tl.sum(left * half_of_word(b, half, IS_BF16).reshape(WARPS, 1, 8, 4), 3)
    return total


@triton.jit
def half_of_word(word: tl.tensor, HALF: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """The low or the high number of a word, fp32."""
    if IS_BF16:
        return (word & -65536 if HALF == 1 else word << 16).to(tl.float32, bitcast=True)
    else:
        return (word >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
