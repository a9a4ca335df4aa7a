"""Device code for codes in groups of fewer channels than a matrix instruction of coded_narrow.py sums.

Each thread turns its codes into weights in 16 bits before the matrix units multiply them, as a launch that expands a
weight does. The lanes of a row have different groups, so each reads its groups' scales. A weight is
s·(u - middle) + shift, with u a code without sign. An operand is 128 + u, so one fused instruction makes

    weight = s·(128 + u) + c,    c = shift - s·(128 + middle) rounded to bf16

The matrix units also multiply the error of c by Σ x of the group, and that product is subtracted from the sum.

fp16 has digits for u - middle but few exponents: scales are multiplied by 16, Σ x is divided by 16, and shifts are
multiplied by Σ x.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED
from llmc.codegen.triton.kernels.products.format_facts import above_bits, by_group, low_bits, stored_zero
from llmc.codegen.triton.kernels.products.group_scales import scale_and_minimum
from llmc.codegen.triton.kernels.products.matrix_words import half_of_word, matrix_sums
from llmc.codegen.triton.kernels.products.operand_tiles import read_tile
from llmc.codegen.triton.kernels.products.weight_codes import small_floats

_BF16_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
_FP16_PAIR = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
_BF16_FUSED = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
_FP16_PRODUCT = tl.constexpr("{ .reg .b32 code; add.rn.f16x2 code, $1, $3; mul.rn.f16x2 $0, code, $2; }")
_REPEAT = tl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_FP16_FACTOR = tl.constexpr(16.0)


@triton.constexpr_function
def is_folded(format: str, columns: int, groups: int) -> bool:
    """Whether a turn of 128 channels has several groups. columns, groups: of a row."""
    return bool(by_group(format, groups) and columns < 128 * groups)


@triton.constexpr_function
def folded_parts(format: str, columns: int, groups: int) -> int:
    """Scales that a lane needs of a row's turn: one, or one for each half of its channels."""
    return 1 if low_bits(format) == 4 and columns >= 32 * groups else 2


@triton.constexpr_function
def sum_factor(is_folded: bool, is_bf16: bool) -> float:
    """The factor of all sums in the end."""
    return 1.0 / _FP16_FACTOR.value if is_folded and not is_bf16 else 1.0


@triton.constexpr_function
def code_middle(format: str) -> int:
    """The code in the middle of those without sign."""
    return 0 if low_bits(format) == 8 else 1 << (low_bits(format) + above_bits(format) - 1)


@triton.jit
def scale_and_shift(
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    FLOATS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tl.tuple:
    """The scale of a channel's group, and its shift if the format has zeros or minima."""
    group = channel // (IN // GROUPS)
    if steps_ptr is None and zeros_ptr is None and minima_ptr is None:
        return (read_tile(scales_ptr + (row * GROUPS + group), inside, not IS_WHOLE),)
    else:
        scale, minimum = scale_and_minimum(
            scales_ptr, minima_ptr, steps_ptr, row, group, inside, GROUPS, FLOATS, FORMAT, not IS_WHOLE
        )
        MIDDLE: tl.constexpr = code_middle(FORMAT) - stored_zero(FORMAT)
        if zeros_ptr is not None:
            zeros = read_tile(zeros_ptr + (row * GROUPS + group), inside, not IS_WHOLE).to(tl.int32)
            return scale, scale * small_floats(MIDDLE - zeros) - minimum
        elif minima_ptr is not None:
            return scale, scale * MIDDLE - minimum
        else:
            tl.static_assert(MIDDLE == 0, "codes without minima have a zero in their middle")
            return (scale,)


@triton.jit
def folded_factors(scale: tl.tensor, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """A scale, rounded, twice in a word."""
    return _pair(scale if IS_BF16 else scale.to(tl.float32) * _FP16_FACTOR, IS_BF16)


@triton.jit
def addends(factors: tl.tensor, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tuple:
    """The addends of `folded` for a group without a shift; then two left operands for a product with `group_sums`, if
    rounding makes it necessary."""
    if low_bits(FORMAT) == 8:
        return (tl.full(factors.shape, -2147450880 if IS_BF16 else 0, tl.int32),)
    elif IS_BF16:
        middle = tl.full(factors.shape, _bf16_pair(128 + code_middle(FORMAT)), tl.int32)
        added = _fused(factors, middle ^ -2147450880, tl.full(factors.shape, -2147450880, tl.int32))
        return added, _fused(factors, middle, added), tl.zeros_like(factors)
    else:
        return (tl.full(factors.shape, _fp16_pair(1024 + code_middle(FORMAT)) - 2147450880, tl.int32),)


@triton.jit
def shifted_addends(factors: tl.tensor, shift: tl.tensor, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tuple:
    """The same for a group with a shift."""
    if IS_BF16:
        OFFSET: tl.constexpr = 0 if low_bits(FORMAT) == 8 else 128 + code_middle(FORMAT)
        wanted = shift - half_of_word(factors, 0, IS_BF16) * OFFSET
        added = _pair(wanted, IS_BF16)
        return added, _pair(half_of_word(added, 0, IS_BF16) - wanted, IS_BF16), tl.zeros_like(factors)
    else:
        shift *= -_FP16_FACTOR * _FP16_FACTOR
        number = _pair(shift, IS_BF16)
        (added,) = addends(factors, FORMAT, IS_BF16)
        return added, number, _pair(shift - half_of_word(number, 0, IS_BF16), IS_BF16)


@triton.constexpr_function
def _bf16_pair(integer: int) -> int:
    """An integer of up to eight bits from 128 on, twice in a word."""
    return (0x4300 | integer - 128) * 65537


@triton.constexpr_function
def _fp16_pair(integer: int) -> int:
    """An integer from 1024 to 2047, twice in a word."""
    return (0x6400 | integer - 1024) * 65537


@triton.jit
def folded(operands: tl.tensor, factors: tl.tensor, added: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """Two operands of code_operands.py times factors, with `addends`, which fp16 adds before it multiplies."""
    if IS_BF16:
        return _fused(operands, factors, added)
    elif INTERPRETED:
        return _fp16_product(operands, factors, added, 0) | (_fp16_product(operands, factors, added, 1) << 16)
    else:
        return tl.inline_asm_elementwise(
            _FP16_PRODUCT, "=r,r,r,r", [operands, factors, added], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _fp16_product(a: tl.tensor, factors: tl.tensor, added: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    exact = half_of_word(a, HALF, False) + half_of_word(added, HALF, False)
    return _half_bits(exact * half_of_word(factors, HALF, False), False)


@triton.jit
def _fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """a·b + c of pairs of bf16, rounded once."""
    if INTERPRETED:
        low = half_of_word(a, 0, True) * half_of_word(b, 0, True) + half_of_word(c, 0, True)
        high = half_of_word(a, 1, True) * half_of_word(b, 1, True) + half_of_word(c, 1, True)
        return _half_bits(low, True) | (_half_bits(high, True) << 16)
    else:
        return tl.inline_asm_elementwise(_BF16_FUSED, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def group_sums(
    x: tl.tuple, PARTS: tl.constexpr, IS_BF16: tl.constexpr, WARPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The negative sum of a thread's 16 words of x, or of each half of them if there are two PARTS, as two
    numbers.

    The words are the left operand of matrix instructions here, each token's in two rows; the right operand has ones
    where a column is the lane's own.
    """
    lane = tl.arange(0, 32 * WARPS) % 32
    one = tl.full([32 * WARPS], -1082081408 if IS_BF16 else -1409242112, tl.int32)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    for j in tl.static_range(4):
        own = tl.where(lane // 4 == lane % 4 * 2 + (j // 2 if PARTS == 2 else 0), one, 0)
        sums = matrix_sums(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3], own, own, sums, IS_BF16, WARPS)
    return _split_pair(sums[0] + sums[2], IS_BF16), _split_pair(sums[1] + sums[3], IS_BF16)


@triton.jit
def _split_pair(number: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """A number in the low half of a word, and what it lacks in the high one."""
    if IS_BF16:
        cut = number.to(tl.int32, bitcast=True) & -65536
        lacking = number - cut.to(tl.float32, bitcast=True)
        return ((cut >> 16) & 0xFFFF) | (lacking.to(tl.int32, bitcast=True) & -65536)
    else:
        number_bits = _half_bits(number, IS_BF16)
        lacking = number - number.to(tl.float16).to(tl.float32)
        return number_bits | (_half_bits(lacking, IS_BF16) << 16)


@triton.jit
def _pair(number: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """A number twice, in 16 bits each."""
    if number.dtype == tl.bfloat16 and IS_BF16:
        return _repeated(number.to(tl.int16, bitcast=True).to(tl.int32))
    elif INTERPRETED:
        return _half_bits(number.to(tl.float32), IS_BF16) * 65537
    else:
        return tl.inline_asm_elementwise(
            _BF16_PAIR if IS_BF16 else _FP16_PAIR, "=r,f", [number.to(tl.float32)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _repeated(half: tl.tensor) -> tl.tensor:
    """The low half of a word twice."""
    if INTERPRETED:
        return (half & 0xFFFF) * 65537
    else:
        return tl.inline_asm_elementwise(_REPEAT, "=r,r", [half], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _half_bits(number: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """The bits of the nearest number of 16 bits, ties to even."""
    if IS_BF16:
        bits = number.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
