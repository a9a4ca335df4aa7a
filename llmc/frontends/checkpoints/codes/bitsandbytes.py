"""bitsandbytes' layouts: NF4 in blocks of the flattened weight, and int8 with a scale per row (LLM.int8).

NF4: two codes per byte, the first one high, over the whole weight. A block of 64 codes shares `absmax`, which is a
number, or itself a code of `nested_quant_map` times the `nested_absmax` of 256 of them, plus an offset. A JSON object
gives the shape and the block sizes. Source: bitsandbytes (functional, nn.modules).
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS
from llmc.frontends.checkpoints.codes.stored_scheme import CodeLayout, StoredParts, StoredScheme
from llmc.graph.stored_codes import UnpackedCodes

_STATE, STATE_FP4 = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
_MOST_STATE_BYTES = 1 << 16
# An LLM.int8 code is a fraction of its row's largest magnitude.
_LARGEST_INT8 = 127


def _state(parts: StoredParts) -> dict[str, Any]:
    if math.prod(parts.shape(_STATE)) > _MOST_STATE_BYTES:
        raise ValueError(f"{_STATE} has {parts.shape(_STATE)} bytes")
    try:
        state = json.loads(bytes(parts.load(_STATE).view(torch.uint8).flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{_STATE} is not a JSON object")
    return state


def _size(state: dict[str, Any], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or not 1 <= size <= 1 << 40:
        raise ValueError(f"{key} is {size!r:.40} in {_STATE}")
    return size


def _nf4_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    shape = _state(parts).get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or n < 1 for n in shape):
        raise ValueError(f"shape is {shape!r:.60} in {_STATE}, expected a matrix")
    return shape[0], shape[1]


def _unpack_nf4(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    state, (rows, columns) = _state(parts), shape
    packed = parts.load("weight").view(torch.uint8).flatten()
    if packed.numel() * 2 - rows * columns not in (0, 1):
        raise ValueError(f"weight holds {packed.numel() * 2} codes, a weight {list(shape)} has {rows * columns}")
    table = parts.load("weight.quant_map").float().flatten()
    known = torch.tensor(CODE_FORMATS["nf4"].table)
    if table.shape != known.shape or not torch.allclose(table, known, atol=1e-5):
        raise ValueError("weight.quant_map is not the table of NF4")
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: rows * columns].view(rows, columns)
    size, largest = _size(state, "blocksize"), _largest(parts, state)
    if largest.numel() != -(-rows * columns // size):
        raise ValueError(f"weight.absmax has {largest.numel()} numbers for {rows * columns} codes in blocks of {size}")
    # A block may end within a row: groups are the longest runs of columns that no block ends in.
    width = math.gcd(size, columns)
    starts = torch.arange(rows)[:, None] * columns + torch.arange(0, columns, width)
    return UnpackedCodes(codes.contiguous(), largest[starts // size], None)


def _largest(parts: StoredParts, state: dict[str, Any]) -> Tensor:
    """The largest magnitude of each block, fp32."""
    stored = parts.load("weight.absmax").flatten()
    nested = [f"weight.nested_{part}" for part in ("absmax", "quant_map")]
    if stored.dtype is not torch.uint8:
        return stored.float()
    if not all(part in parts for part in nested):
        raise ValueError("weight.absmax is codes, and the table that they are in is missing")
    of_blocks, table = (parts.load(part).float().flatten() for part in nested)
    size, offset = _size(state, "nested_blocksize"), state.get("nested_offset")
    if not isinstance(offset, int | float) or len(of_blocks) != -(-len(stored) // size) or len(table) != 256:
        raise ValueError("the nested scales of weight.absmax do not fit it")
    return table[stored.long()] * of_blocks.repeat_interleave(size)[: len(stored)] + offset


def _int8_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    shape = parts.shape("weight")
    if len(shape) != 2 or math.prod(parts.shape("SCB")) != shape[0]:
        raise ValueError(f"weight is {list(shape)} and SCB {list(parts.shape('SCB'))}")
    return shape[0], shape[1]


def _unpack_int8(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    order = parts.get("weight_format")
    if order is not None and bool(order.any()):
        raise ValueError("weight_format says that the codes are in a GPU's order, not row by row")
    scales = parts.load("SCB").float().reshape(shape[0], 1) / _LARGEST_INT8
    return UnpackedCodes(parts.load("weight"), scales, None)


NF4 = CodeLayout(
    ("weight", "weight.absmax", "weight.quant_map", _STATE),
    ("weight.nested_absmax", "weight.nested_quant_map"),
    _nf4_shape,
    _unpack_nf4,
)
INT8 = CodeLayout(("weight", "SCB"), ("weight_format",), _int8_shape, _unpack_int8, ("weight", ("I8",)))
