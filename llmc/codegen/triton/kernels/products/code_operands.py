"""Device code that turns words of a quantized weight's codes into operands of mma.sync, in their registers.

A word is an int32 with four bytes of a row. Its codes become pairs of neighbouring channels in 16 bits each: the
numbers that 8-bit codes stand for, and codes of four to six bits as the mantissa of 128 + code in bf16, or of
1024 + code in fp16.
"""

import triton
import triton.language as tl

from llmc.codegen.triton.kernels.interpreted import INTERPRETED
from llmc.codegen.triton.kernels.products.format_facts import above_bits, low_bits, stored_zero
from llmc.codegen.triton.kernels.products.weight_codes import e4m3_values, small_floats

# Each assembly reads its input before it writes any output, which may be the same register.
_FOUR_BITS = tl.constexpr("""{ .reg .b32 low, high, more;
and.b32 low, $4, 0x0f0f0f0f; shr.u32 high, $4, 4; and.b32 high, high, 0x0f0f0f0f; MORE
prmt.b32 $0, low, EXPONENT, 0x4140; prmt.b32 $1, low, EXPONENT, 0x4342;
prmt.b32 $2, high, EXPONENT, 0x4140; prmt.b32 $3, high, EXPONENT, 0x4342; }""")
# The bits above the low four, of a second plane.
_MORE_BITS = tl.constexpr("""LEFT more, $5, BY_LEFT; lop3.b32 low, more, MASK, low, 0xea;
shr.u32 more, $5, BY_RIGHT; lop3.b32 high, more, MASK, high, 0xea;""")
# The low seven bits as 128 + them, less 128, or 256 for codes with a sign.
_INT8_BF16 = tl.constexpr("""{ .reg .b32 low, sign, first, second, a, b, one;
mov.b32 one, 0x3f803f80; and.b32 low, $2, 0x7f7f7f7f; and.b32 sign, $2, 0x80808080;
prmt.b32 first, low, 0x43434343, 0x4140; prmt.b32 second, low, 0x43434343, 0x4342;
prmt.b32 a, sign, 0xc3c3c3c3, 0x4140; prmt.b32 b, sign, 0xc3c3c3c3, 0x4342;
fma.rn.bf16x2 $0, first, one, a; fma.rn.bf16x2 $1, second, one, b; }""")
# 1024 + 128 + a code, less 1152.
_INT8_FP16 = tl.constexpr("""{ .reg .b32 code, first, second, much;
mov.b32 much, 0xe480e480; xor.b32 code, $2, 0x80808080;
prmt.b32 first, code, 0x64646464, 0x4140; prmt.b32 second, code, 0x64646464, 0x4342;
add.rn.f16x2 $0, first, much; add.rn.f16x2 $1, second, much; }""")
# e4m3 in the place of bf16's exponent and mantissa is 2^120 too small, and in that of fp16's 2^8.
_FP8_BF16 = tl.constexpr("""{ .reg .b32 high, low, first, second, factor, zero;
mov.b32 factor, 0x7b807b80; mov.b32 zero, 0x80008000;
shr.u32 high, $2, 4; and.b32 high, high, 0x07070707; lop3.b32 high, $2, 0x80808080, high, 0xea;
shl.b32 low, $2, 4; and.b32 low, low, 0xf0f0f0f0;
prmt.b32 first, low, high, 0x5140; prmt.b32 second, low, high, 0x7362;
fma.rn.bf16x2 $0, first, factor, zero; fma.rn.bf16x2 $1, second, factor, zero; }""")
_FP8_FP16 = tl.constexpr("""{ .reg .b32 high, low, first, second, factor;
mov.b32 factor, 0x5c005c00; shr.u32 high, $2, 1;
and.b32 high, high, 0x3f3f3f3f; lop3.b32 high, $2, 0x80808080, high, 0xea;
shl.b32 low, $2, 7; and.b32 low, low, 0x80808080;
prmt.b32 first, low, high, 0x5140; prmt.b32 second, low, high, 0x7362;
mul.rn.f16x2 $0, first, factor; mul.rn.f16x2 $1, second, factor; }""")


@triton.constexpr_function
def narrow_words(format: str) -> int:
    """Words of a lane in 128 channels of a row."""
    return int(low_bits(format) + above_bits(format))


@triton.constexpr_function
def operand_offset(format: str, is_bf16: bool) -> int:
    """The difference of operands and the integers that codes stand for; 1 if there is none."""
    if low_bits(format) == 8:
        return 1
    return (128 if is_bf16 else 1024) + int(stored_zero(format))


@triton.constexpr_function
def offset_pair(format: str, is_bf16: bool) -> int:
    """A word with -operand_offset in both halves."""
    if low_bits(format) == 8:
        half = 0xBF80 if is_bf16 else 0xBC00
    else:
        half = (0xC300 if is_bf16 else 0xE400) + int(stored_zero(format))
    return (half << 16 | half) - (1 << 32)


@triton.jit
def offset_operands(
    x_ptr: tl.tensor, FORMAT: tl.constexpr, IS_BF16: tl.constexpr, THREADS: tl.constexpr, IS_OFTEN: tl.constexpr
) -> tl.tuple:
    """Left operands of `offset_pair`. IS_OFTEN: whether many matrix instructions multiply them.

    They are equal, which the assembler must not know then: a matrix instruction reads four registers in a row, and the
    assembler would copy one into four again and again. No address has the bits that are added.
    """
    found: tl.tuple = ()
    for i in tl.static_range(4):
        nothing = (x_ptr.to(tl.int64) >> (60 + i)).to(tl.int32) if IS_OFTEN else 0
        found += (tl.full([THREADS], offset_pair(FORMAT, IS_BF16), tl.int32) + nothing,)
    return found


@triton.constexpr_function
def _shifts(format: str, word: int) -> tuple[int, int]:
    """Bits by which the second plane's are shifted left to those above the low halves of a word's bytes, and right to
    those above the high halves."""
    place = word // above_bits(format) * above_bits(format)
    return 4 - place, place


@triton.constexpr_function
def _mask(format: str) -> int:
    """The bits of a second plane in each byte of a word."""
    return int((1 << above_bits(format)) - 1) * 0x10101010


@triton.constexpr_function
def _four_bits(format: str, word: int, is_bf16: bool) -> str:
    more = ""
    if above_bits(format) > 0:
        left, right = _shifts(format, word)
        more = str(_MORE_BITS.value).replace("LEFT more", "shl.b32 more").replace("BY_LEFT", str(left))
        more = more.replace("BY_RIGHT", str(right)).replace("MASK", hex(_mask(format)))
    assembly = str(_FOUR_BITS.value).replace("MORE", more)
    return assembly.replace("EXPONENT", "0x43434343" if is_bf16 else "0x64646464")


@triton.jit
def row_operands(words: tl.tuple, FIRST: tl.constexpr, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tuple:
    """Operands of a row's words, which begin at FIRST; those of a second plane are last. Each word has two operands, of
    its first and second byte, and of its others; or two of the low halves of its bytes, then two of the high ones."""
    operands: tl.tuple = ()
    for j in tl.static_range(low_bits(FORMAT)):
        if above_bits(FORMAT) > 0:
            operands = operands + _code_pairs(
                words[FIRST + j], words[FIRST + 4 + j % above_bits(FORMAT)], j, FORMAT, IS_BF16
            )
        else:
            operands = operands + _code_pairs(words[FIRST + j], words[FIRST + j], j, FORMAT, IS_BF16)
    return operands


@triton.jit
def _code_pairs(
    word: tl.tensor, above: tl.tensor, PLACE: tl.constexpr, FORMAT: tl.constexpr, IS_BF16: tl.constexpr
) -> tl.tuple:
    """The operands of the word at a PLACE."""
    if low_bits(FORMAT) == 4:
        if INTERPRETED:
            low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
            if above_bits(FORMAT) > 0:
                LEFT, RIGHT = _shifts(FORMAT, PLACE)
                low |= (above << LEFT) & _mask(FORMAT)
                high |= (above >> RIGHT) & _mask(FORMAT)
            return (
                _code_pair(low, 0, IS_BF16), _code_pair(low, 16, IS_BF16),
                _code_pair(high, 0, IS_BF16), _code_pair(high, 16, IS_BF16),
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _four_bits(FORMAT, PLACE, IS_BF16), "=r,=r,=r,=r,r,r", [word, above],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
    elif INTERPRETED:
        return _byte_pair(word, 0, FORMAT, IS_BF16), _byte_pair(word, 16, FORMAT, IS_BF16)
    else:
        OF_FP8: tl.constexpr = _FP8_BF16 if IS_BF16 else _FP8_FP16
        OF_INT8: tl.constexpr = _INT8_BF16 if IS_BF16 else _INT8_FP16
        return tl.inline_asm_elementwise(
            OF_FP8 if FORMAT == "fp8" else OF_INT8, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def _code_pair(codes: tl.tensor, SHIFT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """The operand that assembly makes of the bytes from bit SHIFT on."""
    pair = ((codes >> SHIFT) & 0xFF) | (((codes >> (SHIFT + 8)) & 0xFF) << 16)
    return pair | (0x43004300 if IS_BF16 else 0x64006400)


@triton.jit
def _byte_pair(word: tl.tensor, SHIFT: tl.constexpr, FORMAT: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """The same of the byte from bit SHIFT on, and of the one above."""
    return _half_of(_byte_value(word, SHIFT, FORMAT), IS_BF16) | (
        _half_of(_byte_value(word, SHIFT + 8, FORMAT), IS_BF16) << 16
    )


@triton.jit
def _byte_value(word: tl.tensor, SHIFT: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """fp32 of the code in a byte."""
    code = (word << (24 - SHIFT)) >> 24
    if FORMAT == "fp8":
        return e4m3_values(code)
    else:
        return small_floats(code)


@triton.jit
def _half_of(values: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    """The 16 bits of a number that bf16 and fp16 represent."""
    if IS_BF16:
        return (values.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    else:
        return values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
