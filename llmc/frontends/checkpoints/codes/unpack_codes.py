"""How GPTQ, AWQ and compressed-tensors pack a weight's codes, and how they are unpacked, without rounding anything.

The results are as llmc/ops/weight_codes.py describes: codes [out, in], scales and zeros [out, groups].
"""

import math

import torch
from torch import Tensor

from llmc.graph.stored_codes import UnpackedCodes

# AWQ's kernels expect the eight columns of a word in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, group: int, zero_offset: int
) -> UnpackedCodes:
    """qweight int32 [in · bits / 32, out], qzeros int32 [groups, out · bits / 32], scales [groups, out], g_idx [in].

    zero_offset: 1 for checkpoint_format gptq, which stores zeros less one, 0 for gptq_v2. Raises ValueError for groups
    of unequal size.
    """
    middle = 1 << (bits - 1)
    codes = _unpack(qweight, bits, 0).t() - middle
    zeros = (_unpack(qzeros, bits, 1).t() + zero_offset) - middle
    order = None
    if g_idx is not None:
        sizes = torch.bincount(g_idx.long(), minlength=scales.shape[0])
        if len(sizes) != scales.shape[0] or bool((sizes != group).any()):
            raise ValueError(f"g_idx gives groups {int(sizes.min())} to {int(sizes.max())} columns, expected {group}")
        if not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
            order = torch.argsort(g_idx.long(), stable=True)
            codes = codes[:, order]
    return UnpackedCodes(_int8(codes), scales.t().contiguous(), _zeros(zeros), order)


def unpack_awq(qweight: Tensor, qzeros: Tensor | None, scales: Tensor) -> UnpackedCodes:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8] or None for the middle, scales [groups, out]."""
    codes = _awq_columns(_unpack(qweight, 4, 1)).t() - 8
    zeros = None if qzeros is None else _zeros(_awq_columns(_unpack(qzeros, 4, 1)).t() - 8)
    return UnpackedCodes(_int8(codes), scales.t().contiguous(), zeros)


def unpack_compressed(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    shape: tuple[int, int],
    bits: int | None,
    block: tuple[int, int] | None,
) -> UnpackedCodes:
    """Unpack codes as compressed-tensors stores them.

    weight: int32 words [out, in · bits / 32] if `bits`, else int8 or float8_e4m3fn [out, in]. scale: the scale of the
    tensor, the scales of rows [out, 1], or one for each `block` of rows and columns; a group is one row of it.
    zero_point: as scale; packed along the rows if `bits`.
    """
    rows, columns = shape

    def of_rows(values: Tensor) -> Tensor:
        if block is not None:
            return _of_groups(values, shape, block)
        return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values[:rows].reshape(rows, 1)

    zeros = None
    if zero_point is not None:
        if bits is not None:
            zero_point = _unpack(zero_point, bits, 0) - (1 << (bits - 1))
        zeros = _zeros(of_rows(zero_point.int()))
    if bits is not None:
        codes = _int8(_unpack(weight, bits, 1)[:, :columns] - (1 << (bits - 1)))
    else:
        codes = weight.view(torch.uint8) if weight.dtype is torch.float8_e4m3fn else weight
    return UnpackedCodes(codes.contiguous(), of_rows(scale).contiguous(), zeros)


def _of_groups(values: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Values of blocks [block rows, block columns] → [rows, groups]; the last block of a side may be cut off."""
    rows, columns = shape
    # Groups are runs of equal length: where columns end within a block, of the longest that both are multiples of.
    width = math.gcd(block[1], columns) if columns > block[1] else columns
    starts = torch.arange(0, columns, width) // block[1]
    return values[torch.arange(rows) // block[0]][:, starts]


def unpack_fp4(packed: Tensor, scales: Tensor) -> UnpackedCodes:
    """Unpack 4-bit floats. packed: uint8 [out, in / 2], the first of two columns in the low bits.

    scales: [out, groups].
    """
    return UnpackedCodes(torch.stack((packed & 15, packed >> 4), -1).flatten(1), scales, None)


def powers_of_two(exponents: Tensor) -> Tensor:
    """The bf16 scales of e8m0 exponents, which are stored plus 127: 2^(exponents - 127)."""
    return torch.exp2(exponents.float() - 127).bfloat16()


def are_middle(zeros: Tensor, bits: int | None, offset: int) -> bool:
    """Whether stored zeros, in words of codes of `bits` or as they are, are only the middle of the range.

    offset: what is taken off them when they are stored."""
    if bits is None:
        return not bool(zeros.any())
    return bool((_unpack(zeros, bits, zeros.dim() - 1) == (1 << (bits - 1)) - offset).all())


def _unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Unsigned numbers of some bits along an axis of int32 words, the lowest bits first; int32.

    Numbers of 3 bits run on from one word to the next. Raises ValueError where the words end within a number.
    """
    if 32 % bits:
        return _unpack_stream(words, bits, axis)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = (words.unsqueeze(axis + 1) >> shifts.reshape([-1 if i == axis + 1 else 1 for i in range(3)])) & (
        (1 << bits) - 1
    )
    return parts.flatten(axis, axis + 1)


def _unpack_stream(words: Tensor, bits: int, axis: int) -> Tensor:
    along = words.transpose(axis, -1).contiguous()
    if along.shape[-1] * 32 % bits:
        raise ValueError(f"{along.shape[-1]} words of 32 bits do not hold whole numbers of {bits}")
    stream = (along.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1).to(torch.int8).flatten(-2)
    numbers = torch.zeros(*stream.shape[:-1], stream.shape[-1] // bits, dtype=torch.int32)
    for bit in range(bits):
        numbers |= stream[..., bit::bits].int() << bit
    return numbers.transpose(axis, -1)


def _awq_columns(packed: Tensor) -> Tensor:
    """Put each eight columns in order."""
    columns = torch.empty_like(packed)
    for nibble, column in enumerate(_AWQ_ORDER):
        columns[:, column::8] = packed[:, nibble::8]
    return columns


def _int8(codes: Tensor) -> Tensor:
    return codes.to(torch.int8).contiguous()


def _zeros(zeros: Tensor) -> Tensor | None:
    return _int8(zeros) if bool(zeros.any()) else None
