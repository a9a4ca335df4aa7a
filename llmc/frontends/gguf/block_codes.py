"""Blocks of GGUF tensors unpacked: to codes and scales as they are, or to the numbers that they stand for.

The layouts are ggml's (ggml-common.h, ggml-quants.c). Types without `codes` are decoded by the gguf package.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from llmc.frontends.gguf.block_types import BlockType
from llmc.graph.stored_codes import UnpackedCodes

NUMBERS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
)
# Elements that are decoded at a time: the gguf package makes several arrays of them.
_CHUNK = 1 << 22


def unpack_blocks(data: Tensor, kind: BlockType, columns: int) -> UnpackedCodes:
    """Codes [rows, columns], scales [rows, runs] and what else a type has that has `codes`. data: bytes, 1-D."""
    blocks = data.view(-1, columns // kind.elements, kind.nbytes)
    parts = {name: part.flatten(1).contiguous() for name, part in _UNPACKED[kind.name](blocks).items()}
    return UnpackedCodes(parts.pop("codes"), parts.pop("scales"), zeros=None, **parts)


def decoded(data: bytearray, kind: BlockType, columns: int) -> Tensor:
    """The numbers that blocks represent, fp32 [rows, columns], for a type without `codes`."""
    # Takes a while to import, and most files do without.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = np.frombuffer(data, np.uint8).reshape(-1, columns // kind.elements * kind.nbytes)
    values = torch.empty(len(rows), columns)
    step = max(1, _CHUNK // columns)
    with np.errstate(all="ignore"):  # Warnings about damaged scales, which the caller finds in the result.
        for start in range(0, len(rows), step):
            block = dequantize(rows[start : start + step], GGMLQuantizationType(kind.number))
            values[start : start + step] = torch.from_numpy(np.ascontiguousarray(block))
    return values


# Split blocks [rows, blocks, bytes] into the parts of UnpackedCodes [rows, blocks, …].
_Parts = dict[str, Tensor]


def _q4_0(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 2:]).view(torch.int8) - 8, "scales": _halves(blocks, 0)}


def _q4_1(blocks: Tensor) -> _Parts:
    return {
        "codes": _nibbles(blocks[..., 4:]).view(torch.int8),
        "scales": _halves(blocks, 0),
        "minima": -_halves(blocks, 2),
    }


def _q5_0(blocks: Tensor) -> _Parts:
    return {"codes": _fives(blocks[..., 2:]) - 16, "scales": _halves(blocks, 0)}


def _q5_1(blocks: Tensor) -> _Parts:
    return {"codes": _fives(blocks[..., 4:]), "scales": _halves(blocks, 0), "minima": -_halves(blocks, 2)}


def _q8_0(blocks: Tensor) -> _Parts:
    return {"codes": blocks[..., 2:].view(torch.int8), "scales": _halves(blocks, 0)}


def _mxfp4(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 1:]), "scales": torch.exp2(blocks[..., :1].float() - 127).bfloat16()}


def _q2_k(blocks: Tensor) -> _Parts:
    steps = blocks[..., :16]
    return {
        "codes": _pairs(blocks[..., 16:80]).view(torch.int8),
        "scales": _halves(blocks, 80),
        "scale_steps": (steps & 15).view(torch.int8),
        "minima": _halves(blocks, 82),
        "minimum_steps": (steps >> 4).view(torch.int8),
    }


def _q3_k(blocks: Tensor) -> _Parts:
    # The third bit of the code i + 32 · j is the j-th of byte i.
    above = _bits(blocks[..., :32], 1)
    low, high = _nibbles(blocks[..., 96:104]), _bits(blocks[..., 104:108], 2)
    return {
        "codes": (_pairs(blocks[..., 32:96]) | above << 2).view(torch.int8) - 4,
        "scales": _halves(blocks, 108),
        "scale_steps": (low | high << 4).view(torch.int8) - 32,
    }


def _q4_k(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2).view(torch.int8), **_six(blocks)}


def _q5_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return {"codes": (low | _bits(blocks[..., 16:48], 1) << 4).view(torch.int8), **_six(blocks)}


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    above = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    return {
        "codes": (low | above << 4).view(torch.int8) - 32,
        "scales": _halves(blocks, 208),
        "scale_steps": blocks[..., 192:208].view(torch.int8),
    }


def _iq4_nl(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 2:]), "scales": _halves(blocks, 0)}


def _iq4_xs(blocks: Tensor) -> _Parts:
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    steps = torch.stack((low & 15, low >> 4), -1).flatten(-2) | _in_order(high, 2) << 4
    return {
        "codes": _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2),
        "scales": _halves(blocks, 0),
        "scale_steps": steps.view(torch.int8) - 32,
    }


_UNPACKED: Mapping[str, Callable[[Tensor], _Parts]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "MXFP4": _mxfp4,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
    }
)


def _nibbles(packed: Tensor) -> Tensor:
    """Return all low halves of bytes, then all high ones."""
    return _bits(packed, 4)


def _fives(packed: Tensor) -> Tensor:
    """Four bytes with the fifth bit of each weight, the first in the lowest; then the others."""
    return (_nibbles(packed[..., 4:]) | _in_order(packed[..., :4], 1) << 4).view(torch.int8)


def _pairs(packed: Tensor) -> Tensor:
    """Codes of two bits: each 32 bytes hold 128 codes."""
    return _bits(packed.unflatten(-1, (2, 32)), 2).flatten(-2)


def _bits(packed: Tensor, count: int) -> Tensor:
    """The lowest `count` bits of all bytes, then the next ones of all, and so on."""
    parts = [packed >> shift & ((1 << count) - 1) for shift in range(0, 8, count)]
    return torch.cat(parts, -1)


def _in_order(packed: Tensor, count: int) -> Tensor:
    """Return all codes of the first byte, `count` bits each, then all of the second, and so on."""
    parts = [packed >> shift & ((1 << count) - 1) for shift in range(0, 8, count)]
    return torch.stack(parts, -1).flatten(-2)


def _six(blocks: Tensor) -> _Parts:
    """Eight scales and eight minima, of six bits each, after the floats that they are multiplied by.

    Byte i of the first four holds the scale i, of the next four the minimum i; their two highest bits are those of the
    scale and minimum i + 4, whose lower bits are in the last four.
    """
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6) << 4), -1)
    minima = torch.cat((second & 63, last >> 4 | (second >> 6) << 4), -1)
    return {
        "scales": _halves(blocks, 0),
        "scale_steps": scales.view(torch.int8),
        "minima": _halves(blocks, 2),
        "minimum_steps": minima.view(torch.int8),
    }


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number of each block at that byte, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)
