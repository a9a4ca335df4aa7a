"""The ways to compute a product with a weight of codes on a target, and their tiles: coded_gemv.py, coded_narrow.py,
coded_tile.py."""

from dataclasses import replace

import torch
import triton

from llmc.codegen.triton.kernels.products.product import Codes, Product
from llmc.codegen.triton.kernels.products.product_way import MOST_GEMV_ROWS, MOST_SPLIT_ROWS, Tiling, Way, token_block
from llmc.codegen.triton.kernels.products.sparse_ways import sparse_gemv
from llmc.codegen.triton.kernels.products.super_blocks import is_in_blocks
from llmc.formats.code_format import CODE_FORMATS
from llmc.targets import GpuTarget

# Bytes of codes that a thread reads at once, and channels of a tile's turn without groups.
_THREAD_BYTES = 16
_CHANNELS = 128
# Rows of x that coded_narrow.py multiplies in registers, and channels of its turns, which are whole.
MOST_NARROW_ROWS, NARROW_CHANNELS = 16, 128
NARROW_FORMATS = frozenset({"int4", "int5", "int6", "int8", "fp8", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k"})
_LEAST_NARROW_GROUP = 16
# More tiles than these for each multiprocessor are not split: the partial sums of a head would be as large as it is.
_MOST_WAVES = 8
# The share of the peak rate that tiles would reach if decoding took no time, and the number of tokens whose products
# take as long as decoding int4.
_DECODED_EFFICIENCY, _INT4_DECODING, _SHORT_TURN = 0.26, 36, 0.6
# The least depth of both operands in a matrix instruction of 8-bit numbers.
_LEAST_DEPTH = 32


def code_operands(product: Product, codes: Codes, target: GpuTarget) -> str:
    """The operand type of the matrix units for a product's tiles."""
    depth = _tile_channels(product, codes, target) // codes.per_byte
    return operand_type(codes.x_format, product.call.dtype("x"), depth, target)


def operand_type(x_format: str, dtype: torch.dtype, depth: int, target: GpuTarget) -> str:
    """The operand type of the matrix units: int8 or fp8 codes where supported, else x's type, which is exact.

    dtype: of x before it is rounded to x_format. depth: channels that are multiplied at once.
    """
    if x_format == "int8" and depth >= _LEAST_DEPTH:
        return "int8"
    if x_format == "fp8" and depth >= _LEAST_DEPTH and target.fp8_rate is not None and target.backend == "cuda":
        return "fp8"
    if x_format != "none":
        return "bf16"
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def code_tilings(product: Product, codes: Codes, target: GpuTarget, tokens: int) -> tuple[Tiling, ...]:
    """The ways that can serve that many rows on the target."""
    shapes = _narrow(product, codes, target, tokens) if tokens <= MOST_NARROW_ROWS else []
    numbers = codes.as_numbers
    if numbers is not None and numbers.codes is not None and tokens <= MOST_NARROW_ROWS:
        shapes = [replace(t, as_numbers=True) for t in _narrow(numbers, numbers.codes, target, tokens)]
    if not shapes and tokens <= MOST_GEMV_ROWS:
        shapes = [_gemv(product, codes, target, tokens)]
    in_block = _tile_channels(product, codes, target)
    operands = code_operands(product, codes, target)
    if operands == "fp32":
        # There are no matrix units for fp32: a gate's operands and its partner's lie in registers side by side.
        most_tokens, channels = (16, 32) if product.gated else (32, 64)
        block = token_block(tokens, most_tokens)
        for splits in (1, 2, 4, 8) if tokens <= MOST_SPLIT_ROWS else (1,):
            warps = 8 if product.gated and splits > 1 else 4
            shapes.append(Tiling(Way.CODED_TILE, block, 32, min(channels, in_block), warps, 2, 0.3, splits))
        return tuple(shapes)
    if tokens <= MOST_SPLIT_ROWS:
        block = token_block(tokens, most=32 if product.gated else 64)
        many = triton.cdiv(product.outputs, 64) * triton.cdiv(tokens, block) > _MOST_WAVES * target.sm_count
        for splits in (1,) if many else (1, 2, 4, 8):
            if splits == 1 or product.channels >= splits * in_block:
                efficiency, warps = (
                    _efficiency(codes, block, in_block, 0.35),
                    _split_warps(product, codes, target, block),
                )
                shapes.append(Tiling(Way.CODED_TILE, block, 64, in_block, warps, 3, efficiency, splits))
    if tokens > 32:
        # Where matrix units keep sums in registers, the sums of a gate, its partner and a group spill.
        # So do codes' bits above the low four, which also take shared memory.
        is_wide = target.arch in (90, 100) or not (product.gated or codes.in_planes)
        if is_wide:
            # The integer sums of a group of x's channels spill as well where tensor memory does not keep them.
            is_large = operands == "int8" and product.constants["X_GROUPS"] != 1 and target.arch == 100
            wide = 64 if product.gated or is_large else 128
            shapes.append(Tiling(Way.CODED_TILE, 128, wide, in_block, 8, 3, _efficiency(codes, 128, in_block, 0.5)))
        block = 32 if product.gated and codes.in_planes and not is_wide else 64
        warps = 4 if is_wide else 8
        shapes.append(Tiling(Way.CODED_TILE, block, 64, in_block, warps, 3, _efficiency(codes, block, in_block, 0.4)))
    return tuple(shapes)


def _split_warps(product: Product, codes: Codes, target: GpuTarget, block: int) -> int:
    """Warps of a tile whose sums are split: the largest tiles of some formats with minima spill in four warps if matrix
    units keep sums in registers."""
    record, keeps_sums = CODE_FORMATS[codes.format], target.backend == "cuda" and target.arch not in (90, 100)
    is_large = record.in_planes if product.gated else record.steps is None
    return 8 if keeps_sums and record.has_minimum and is_large and block >= (32 if product.gated else 64) else 4


def decoding_instructions(format: str) -> int:
    """Instructions of a lane to decode a code and store its value, at most; tests count them in the machine code."""
    record = CODE_FORMATS[format]
    if record.table is not None and not record.power_of_two:
        return 21
    return 15 if record.in_planes or record.integers is None else 11


def gemv_instructions(codes: Codes, tokens: int) -> int:
    """Instructions of a lane in coded_gemv.py for each byte of codes, about. An H200's time for int4 weights of an 8B
    model followed from 20 of them for one token, and that for an int8 head from 9."""
    return 7 + 2 * tokens if codes.per_byte == 1 else 14 + 6 * tokens


def tile_instructions(codes: Codes, x_groups: int, block: int) -> float:
    """Instructions of a lane in coded_tile.py for each byte of codes, about, if tokens are rounded: counted in the
    machine code for an H100. block: tokens of a tile."""
    record = CODE_FORMATS[codes.format]
    of_code = 1.3 if codes.per_byte == 1 else 5.5
    if record.steps is not None or record.has_minimum:
        of_code += 5.5
    if x_groups > 1:
        # The sums of each group become fp32 and are multiplied by their tokens' scales.
        of_code += 3 + block / 9
    return of_code * codes.per_byte


def _efficiency(codes: Codes, block: int, in_block: int, of_codes: float) -> float:
    """The share of the peak rate for tiles of `block` tokens; `of_codes` if tokens are codes.

    A tile takes the time of decoding plus that of its tokens. On an H200, int4 weights of an 8B model took 34 us for 32
    tokens in tiles of 32, and 298 us for 512 tokens in tiles of 128 (means of four products). Turns of 32 channels,
    as for groups of 32, take 2.5 times the instructions for each code.
    """
    if codes.x_format != "none":
        return of_codes
    decoding = _INT4_DECODING * decoding_instructions(codes.format) / decoding_instructions("int4")
    decoding *= max(1.0, _SHORT_TURN * _CHANNELS / in_block)
    return _DECODED_EFFICIENCY * block / (block + decoding)


def _tile_channels(product: Product, codes: Codes, target: GpuTarget) -> int:
    """Channels of a tile's turn: no more than share a scale, than fit an AMD GPU's shared memory, or the registers
    where their places have to be computed."""
    most = _CHANNELS // 2 if target.backend == "hip" or product.sparse is not None else _CHANNELS
    return min(most, codes.group or most)


def _narrow(product: Product, codes: Codes, target: GpuTarget, tokens: int) -> list[Tiling]:
    """16 rows of W, and warps along the channels. More registers would leave one block per multiprocessor, which cannot
    load while it multiplies.

    These sizes were the fastest of several on an H200: the products of a layer of an 8B model took 47 us for one token,
    78 for 8, and 223 for 32, where tiles in shared memory took 138.
    """
    is_known = codes.format in NARROW_FORMATS and codes.x_format == "none" and product.itemsize == 2
    is_known = is_known and product.sparse is None and product.channels % NARROW_CHANNELS == 0
    groups = int(product.constants["GROUPS"] or 1)
    is_known = is_known and (groups == 1 or product.channels // groups >= _LEAST_NARROW_GROUP)
    if target.backend != "cuda" or not is_known:
        return []
    block = 1 if tokens == 1 else max(8, triton.next_power_of_2(tokens))
    turns = product.channels // NARROW_CHANNELS
    in_blocks = is_in_blocks(codes.format, product.channels, int(product.constants["FLOATS"] or 1))
    least = 2 if in_blocks else 1
    warps = next((w for w in ((4,) if product.gated else (8, 4)) if turns % (w * least) == 0), 8 if turns > 8 else 4)
    is_folded = groups > 1 and product.channels < groups * NARROW_CHANNELS
    most = 4 if product.gated and block > 1 and not is_folded else 2
    most = 1 if block > 8 or codes.per_byte == 1 else most
    at_once = next(count for count in (4, 2, 1) if count <= most and triton.cdiv(turns, warps) % count == 0)
    at_once = 2 if in_blocks else at_once
    # A block of a single token's x takes more instructions than a turn, so more rows share it.
    is_long = in_blocks and product.outputs >= 16 * target.sm_count
    out_block = 16 if product.gated or (block == 1 and not is_long) else 32
    return [Tiling(Way.CODED_NARROW, block, out_block, at_once * NARROW_CHANNELS, warps, 1, 0.06)]


def _gemv(product: Product, codes: Codes, target: GpuTarget, tokens: int) -> Tiling:
    """Warps along a row's channels; fewer outputs a program where there would be too few programs, or registers."""
    if product.sparse is not None:
        return sparse_gemv(product, target, tokens, Way.CODED_GEMV)
    per_warp = target.warp_size * (_THREAD_BYTES if tokens == 1 else _THREAD_BYTES // 2) * codes.per_byte
    warps = next((w for w in (4, 2) if product.channels % (w * per_warp) == 0), 1)
    out_block = max(1, 2 // triton.next_power_of_2(tokens))
    while out_block > 1 and product.outputs < 4 * target.sm_count * out_block:
        out_block //= 2
    return Tiling(Way.CODED_GEMV, triton.next_power_of_2(tokens), out_block, warps * per_warp, warps, 1, 1.0)
