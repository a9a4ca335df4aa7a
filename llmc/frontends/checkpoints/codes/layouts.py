"""The published layouts: the tensors of each, the shape of its weight, and how its codes are unpacked.

Sources: AutoGPTQ and GPTQModel (qlinear), AutoAWQ (packing_utils), compressed-tensors (compressors), ModelOpt (export),
transformers (finegrained_fp8, fbgemm_fp8).
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llmc.frontends.checkpoints.codes.marlin_24 import marlin_24_shape, unpack_marlin_24
from llmc.frontends.checkpoints.codes.stored_scheme import CodeLayout, StoredParts, StoredScheme
from llmc.frontends.checkpoints.codes.unpack_codes import (
    are_middle,
    powers_of_two,
    unpack_awq,
    unpack_compressed,
    unpack_fp4,
    unpack_gptq,
)
from llmc.graph.stored_codes import UnpackedCodes

# Scales that llmc does not use: those of activations, and of cached keys and values.
OF_ACTIVATIONS = ("input_scale", "activation_scale", "act_scale", "act_scales")
OF_CACHES = ("k_scale", "v_scale", "q_scale", "k_bias", "v_bias", "output_scale")
_UNUSED = (*OF_ACTIVATIONS, *OF_CACHES)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def _scheme_bits(scheme: StoredScheme) -> int:
    if scheme.bits is None:
        raise ValueError("the number of bits per code is not given")
    return scheme.bits


def _matrix(parts: StoredParts, suffix: str) -> tuple[int, int]:
    shape = parts.shape(suffix)
    if len(shape) != 2:
        raise ValueError(f"{suffix} is {list(shape)}, not a matrix")
    return shape[0], shape[1]


def _per_word(scheme: StoredScheme, words: int) -> int:
    """Codes in a number of 32-bit words. Raises ValueError if they end within a word."""
    codes, rest = divmod(32 * words, _scheme_bits(scheme))
    if rest:
        raise ValueError(f"{words} words do not hold whole codes of {scheme.bits} bits")
    return codes


# GPTQ: qweight int32 [in · bits / 32, out], qzeros int32 [groups, out · bits / 32], scales [groups, out], g_idx [in].


def _gptq_bits(parts: StoredParts) -> int:
    (_, words), (_, columns) = _matrix(parts, "qzeros"), _matrix(parts, "scales")
    bits, rest = divmod(32 * words, columns) if columns else (0, 0)
    if rest or not bits:
        raise ValueError(f"qzeros has {words} words and scales {columns} columns")
    return bits


def _gptq_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    words, rows = _matrix(parts, "qweight")
    return rows, _per_word(scheme, words)


def _unpack_gptq(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    zeros, scales, bits = parts.load("qzeros"), parts.load("scales"), _scheme_bits(scheme)
    offset = zero_offset(zeros, scheme)
    stored = (parts.load("qweight"), zeros, scales, parts.get("g_idx"))
    return unpack_gptq(*stored, bits, shape[1] // max(1, len(scales)), offset)


def zero_offset(zeros: Tensor, scheme: StoredScheme) -> int:
    """The offset subtracted from these zeros when they were stored."""
    other = 1 - scheme.zero_offset
    return other if scheme.is_symmetric and are_middle(zeros, scheme.bits, other) else scheme.zero_offset


GPTQ = CodeLayout(
    ("qweight", "qzeros", "scales"), ("g_idx",), _gptq_shape, _unpack_gptq, ("qweight", ("I32",)), _gptq_bits
)


# AWQ: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out].


def _awq_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    columns, words = _matrix(parts, "qweight")
    return _per_word(scheme, words), columns


def _unpack_awq(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    return unpack_awq(parts.load("qweight"), parts.get("qzeros"), parts.load("scales"))


AWQ = CodeLayout(("qweight", "scales", "qzeros"), (), _awq_shape, _unpack_awq, ("qweight", ("I32",)))
AWQ_SYMMETRIC = replace(AWQ, required=("qweight", "scales"), optional=("qzeros",))


# Rows of int8 or e4m3 codes as they are, scales of the tensor, its rows, or blocks.


def _rows_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    shape, scales = _matrix(parts, "weight"), parts.shape("weight_scale")
    if scheme.block is not None:
        expected = tuple(-(-side // size) for side, size in zip(shape, scheme.block, strict=True))
        if scales != expected:
            reason = f"where blocks of {list(scheme.block)} of a weight {list(shape)} make it {list(expected)}"
            raise ValueError(f"weight_scale has shape {list(scales)}, {reason}")
    return shape


def _unpack_rows(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    scale, zeros = parts.load("weight_scale"), parts.get("weight_zero_point")
    unpacked = unpack_compressed(parts.load("weight"), scale, zeros, shape, None, scheme.block)
    return _in_group_order(unpacked, parts.get("weight_g_idx"))


ROWS = CodeLayout(
    ("weight", "weight_scale"),
    ("weight_zero_point", "weight_g_idx"),
    _rows_shape,
    _unpack_rows,
    ("weight", ("I8", "F8_E4M3")),
    unused=_UNUSED,
)


# The same with codes of some bits in words of 32.


def _packed_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    stored = parts.load("weight_shape").flatten()
    sides = [] if stored.is_floating_point() else stored.tolist()
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"weight_shape holds {stored.tolist()!r:.60}, not two sizes")
    return int(sides[0]), int(sides[1])


def _unpack_integers(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    packed, scale, zeros = parts.load("weight_packed"), parts.load("weight_scale"), parts.get("weight_zero_point")
    unpacked = unpack_compressed(packed, scale, zeros, shape, _scheme_bits(scheme), scheme.block)
    return _in_group_order(unpacked, parts.get("weight_g_idx"))


PACKED_INTEGERS = CodeLayout(
    ("weight_packed", "weight_scale", "weight_shape"),
    ("weight_zero_point", "weight_g_idx"),
    _packed_shape,
    _unpack_integers,
    ("weight_packed", ("I32",)),
    unused=_UNUSED,
)


def _marlin_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    return marlin_24_shape(_matrix(parts, "weight_packed"), _scheme_bits(scheme))


def _unpack_marlin(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    packed, scales, meta = (parts.load(suffix) for suffix in MARLIN_24.required)
    return UnpackedCodes(*unpack_marlin_24(packed, scales, meta, _scheme_bits(scheme)), zeros=None)


MARLIN_24 = CodeLayout(
    ("weight_packed", "scale_packed", "meta"), (), _marlin_shape, _unpack_marlin, ("weight_packed", ("I32",))
)


# e2m1: two codes per byte, the first of two columns low. A group's scale is an exponent, or e4m3 times the tensor's.


def _e2m1_shape(codes: str, parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    rows, halves = _matrix(parts, codes)
    return rows, 2 * halves


def _unpack_powers(codes: str, parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    scales = parts.load("weight_scale")
    if scales.dtype not in _EXPONENTS:
        raise ValueError(f"weight_scale is {scales.dtype}, expected exponents")
    return unpack_fp4(parts.load(codes), powers_of_two(scales.view(torch.uint8)))


def _unpack_global(
    codes: str, whole: str, parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme
) -> UnpackedCodes:
    groups, of_all = parts.load("weight_scale"), parts.load(whole).float().reshape(1, 1)
    wide = (groups.view(torch.float8_e4m3fn) if groups.dtype is torch.uint8 else groups).float()
    # compressed-tensors stores what e4m3 scales are divided by, ModelOpt what they are multiplied with.
    return unpack_fp4(parts.load(codes), wide / of_all if whole == "weight_global_scale" else wide * of_all)


def _e2m1(codes: str, whole: str | None = None) -> CodeLayout:
    """codes: the suffix of the codes. whole: that of the tensor's scale."""
    unpack = partial(_unpack_powers, codes) if whole is None else partial(_unpack_global, codes, whole)
    required = (codes, "weight_scale", *(() if whole is None else (whole,)))
    unused = (*_UNUSED, "input_global_scale")
    return CodeLayout(required, (), partial(_e2m1_shape, codes), unpack, (codes, ("U8",)), unused=unused)


E2M1_POWERS = _e2m1("weight_packed")
E2M1_GLOBAL = _e2m1("weight_packed", "weight_global_scale")
MODELOPT_MXFP4 = _e2m1("weight")
MODELOPT_NVFP4 = _e2m1("weight", "weight_scale_2")


# e4m3 whose scales' shape says what they are of, under the names that each library gives them.


def _float8_shape(suffix: str, parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    shape = _matrix(parts, "weight")
    _block_of(parts.shape(suffix), shape, scheme.block)
    return shape


def _unpack_float8(suffix: str, parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    scale = parts.load(suffix)
    if scale.dtype in _EXPONENTS:
        scale = powers_of_two(scale.view(torch.uint8))
    block = _block_of(tuple(scale.shape), shape, scheme.block)
    return unpack_compressed(parts.load("weight"), scale.reshape(_sides(tuple(scale.shape))), None, shape, None, block)


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """ModelOpt's blocks have extra axes of size one."""
    return shape if len(shape) <= 2 else tuple(side for side in shape if side > 1)


def _block_of(scales: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for one scale per row, or a single one. Raises ValueError for other
    shapes."""
    (rows, columns), sides = shape, _sides(scales)
    if math.prod(scales) == 1 or sides in ((rows,), (rows, 1)):
        return None
    if block is not None and sides == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    if len(sides) == 2 and sides[0] == rows and sides[1] and columns % sides[1] == 0:
        return 1, columns // sides[1]
    of_blocks = "" if block is None else f", or of blocks of {list(block)}"
    raise ValueError(f"the scales are {list(scales)}, not of the weight {list(shape)}, its rows{of_blocks}")


def _float8(scale: str) -> CodeLayout:
    shape, unpack = partial(_float8_shape, scale), partial(_unpack_float8, scale)
    return CodeLayout(("weight", scale), (), shape, unpack, ("weight", ("F8_E4M3",)), unused=_UNUSED)


FLOAT8 = _float8("weight_scale")
# transformers and DeepSeek also use this name for the scale, not its inverse.
FLOAT8_INVERSE = _float8("weight_scale_inv")


# ModelOpt's int8: rows with a scale per row.
INT8_ROWS = replace(ROWS, optional=(), codes=("weight", ("I8",)))


def _in_group_order(unpacked: UnpackedCodes, g_idx: Tensor | None) -> UnpackedCodes:
    """compressed-tensors keeps columns in place and says the group of each: sort them, so that groups are runs."""
    if g_idx is None or bool((g_idx.diff() >= 0).all()):
        return unpacked
    order = torch.argsort(g_idx.long(), stable=True)
    sizes = torch.bincount(g_idx.long(), minlength=unpacked.scales.shape[1])
    if len(sizes) != unpacked.scales.shape[1] or int(sizes.min()) != int(sizes.max()):
        raise ValueError(f"weight_g_idx gives groups {int(sizes.min())} to {int(sizes.max())} columns")
    return replace(unpacked, codes=unpacked.codes[:, order].contiguous(), order=order)
