"""What codes of weights and tokens stand for: llmc::dequantize, sparse_bitmask, sparse_codes and round_tokens."""

from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import Body, Operand, Value
from llmc.formats.code_format import CODE_FORMATS
from llmc.ops.sparse_weight import MASK_BITS

llmc = torch.ops.llmc


def dequantize(b: Body, codes: Value, scales: Value, zeros: Value | None, format: str) -> str:
    """DequantizeLinear of blocks, a group of columns each; a table or a cast where codes are no integers."""
    rows, columns, groups = codes.size(0), codes.size(1), scales.size(1)
    if CODE_FORMATS[format].integers is None:
        return _scaled(b, code_numbers(b, codes, format), scales, rows, columns, groups)
    return b("DequantizeLinear", codes, scales, zeros, axis=1, block_size=columns // groups)


def code_numbers(b: Body, codes: Operand, format: str) -> str:
    """What codes stand for before they are scaled, fp32."""
    table = CODE_FORMATS[format].table
    if table is None:
        return b("Cast", codes, to=TensorProto.FLOAT)
    return b("Gather", b.constant(np.array(table, np.float32)), b("Cast", codes, to=TensorProto.INT32), axis=0)


def _scaled(b: Body, numbers: str, scales: Value, rows: int, columns: int, groups: int) -> str:
    if groups == 1:
        return b("Mul", numbers, scales)
    grouped = b("Mul", b.reshape(numbers, rows, groups, -1), b.unsqueeze(scales, 2))
    return b.reshape(grouped, rows, columns)


def sparse_bitmask(b: Body, values: Value, masks: Value, columns: int) -> str:
    """The elements that masks say, with zeros between them."""
    return _expanded(b, values, masks, columns)


def sparse_codes(b: Body, values: Value, masks: Value, scales: Value, columns: int, format: str) -> str:
    """What the codes that masks say stand for."""
    numbers = _expanded(b, Value(code_numbers(b, values, format), scales.fake), masks, columns)
    return _scaled(b, numbers, scales, masks.size(0), columns, scales.size(1))


def _expanded(b: Body, values: Value, masks: Value, columns: int) -> str:
    """values[how many bits are set before], where a bit is set."""
    words = b("Cast", b.unsqueeze(masks, 2), to=TensorProto.UINT64)
    shifted = b("BitShift", words, b.constant(np.arange(MASK_BITS, dtype=np.uint64)), direction="RIGHT")
    bits = b("BitwiseAnd", shifted, b.constant(np.array(1, np.uint64)))
    kept = b.slice(b.reshape(b("Cast", bits, to=TensorProto.INT64), masks.size(0), -1), 1, 0, columns)
    before = b("Sub", b("CumSum", b.reshape(kept, -1), b.integer(0)), b.integer(1))
    found = b("Gather", values, b("Max", before, b.integer(0)), axis=0)
    return b("Where", b("Cast", kept, to=TensorProto.BOOL), b.reshape(found, -1, columns), b.number(0.0))


def round_tokens(b: Body, x: Value, scale: Value | None, format: str, group: int | None = None) -> str:
    """Each token's channels rounded to codes with one scale, or one for each group of channels, and back."""
    if group is None:
        return _rounded(b, x, scale, format)
    last, channels = len(x.shape) - 1, x.size(-1)
    groups = -(-channels // group)
    whole = groups * group
    padded = b("Pad", x, b.integers([0] * (2 * last + 1) + [whole - channels])) if whole > channels else x
    grouped = b.reshape(padded, *[0] * last, groups, group)
    rounded = b.reshape(_rounded(b, grouped, None, format), *[0] * last, whole)
    return b.slice(rounded, last, 0, channels) if whole > channels else rounded


def _rounded(b: Body, x: Operand, scale: Value | None, format: str) -> str:
    """With one scale for all of the last axis."""
    largest = CODE_FORMATS[format].largest
    if scale is None:
        magnitude = b("ReduceMax", b("Abs", x), b.integers([-1]), keepdims=1)
        scales = b("Div", magnitude, b.number(largest))
        is_zero = b("Equal", magnitude, b.number(0.0))
        inverse = b("Where", is_zero, b.number(0.0), b("Div", b.number(largest), magnitude))
    else:
        scales, inverse = scale.name, b("Reciprocal", scale)
    scaled = b("Clip", b("Mul", x, inverse), b.number(-largest), b.number(largest))
    if CODE_FORMATS[format].integers is not None:
        return b("Mul", b("Round", scaled), scales)
    codes = b("Cast", scaled, to=TensorProto.FLOAT8E4M3FN)
    return b("Mul", b("Cast", codes, to=TensorProto.FLOAT), scales)


FUNCTIONS: dict[Any, Any] = {
    llmc.dequantize.default: dequantize,
    llmc.sparse_bitmask.default: sparse_bitmask,
    llmc.sparse_codes.default: sparse_codes,
    llmc.round_tokens.default: round_tokens,
}
