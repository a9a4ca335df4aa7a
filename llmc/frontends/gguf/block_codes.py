"""Blocks of GGUF tensors unpacked: to codes and scales as they are, or to the numbers that they stand for.

The layouts are ggml's (ggml-common.h): 32 weights a block, the scale in fp16 first, and in a byte two weights that are
16 apart. What has other blocks is decoded by the gguf package.
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
    """Codes [rows, columns] and scales [rows, columns / 32] of a type that has `codes`. data: bytes, 1-D."""
    blocks = data.view(-1, columns // kind.elements, kind.nbytes)
    codes, scales = _UNPACKED[kind.name](blocks)
    return UnpackedCodes(codes.flatten(1).contiguous(), scales.contiguous(), zeros=None)


def decoded(data: bytearray, kind: BlockType, columns: int) -> Tensor:
    """What blocks stand for, fp32 [rows, columns]: of a type that has no `codes`."""
    # Takes a while to import, and most files do without.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = np.frombuffer(data, np.uint8).reshape(-1, columns // kind.elements * kind.nbytes)
    values = torch.empty(len(rows), columns)
    step = max(1, _CHUNK // columns)
    with np.errstate(all="ignore"):  # Of damaged scales, which are seen in what comes out.
        for start in range(0, len(rows), step):
            found = dequantize(rows[start : start + step], GGMLQuantizationType(kind.number))
            values[start : start + step] = torch.from_numpy(np.ascontiguousarray(found))
    return values


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return (_nibbles(blocks[..., 2:]).view(torch.int8) - 8), _scales(blocks)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # Four bytes with the fifth bit of each weight, the first in the lowest.
    bits = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1
    return ((_nibbles(blocks[..., 6:]) | bits.flatten(-2) << 4).view(torch.int8) - 16), _scales(blocks)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[..., 2:].view(torch.int8), _scales(blocks)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[..., 1:]), torch.exp2(blocks[..., 0].float() - 127).bfloat16()


_UNPACKED: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = MappingProxyType(
    {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0, "MXFP4": _mxfp4}
)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _scales(blocks: Tensor) -> Tensor:
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
