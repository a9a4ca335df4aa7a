"""The numbers that codes of weights and tokens represent: llmc::dequantize, sparse_bitmask, sparse_codes and
round_tokens."""

from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import Body, Operand, Value
from llmc.formats.code_format import CODE_FORMATS
from llmc.ops.sparse_weight import MASK_BITS

llmc = torch.ops.llmc


def dequantize(
    b: Body,
    codes: Value,
    scales: Value,
    zeros: Value | None,
    format: str,
    scale_steps: Value | None,
    minima: Value | None,
    minimum_steps: Value | None,
) -> str:
    """Decode blocks, one per group of columns, with DequantizeLinear; codes that are not integers by a table or a cast.
    Standard ops around it apply steps and minima, with the same roundings."""
    rows, columns, groups = codes.size(0), codes.size(1), (scale_steps or scales).size(1)
    of_groups = _in_steps(b, scales, scale_steps)
    if CODE_FORMATS[format].integers is None:
        values = _scaled(b, code_numbers(b, codes, format), of_groups, rows, columns, groups)
    else:
        values = b("DequantizeLinear", codes, of_groups, zeros, axis=1, block_size=columns // groups)
    if minima is None:
        return values
    grouped = b.reshape(values, rows, groups, -1)
    return b.reshape(b("Sub", grouped, b.unsqueeze(_in_steps(b, minima, minimum_steps), 2)), rows, columns)


def _in_steps(b: Body, floats: Value, steps: Value | None) -> Operand:
    """[rows, groups]: floats [rows, runs] times the steps of their groups, if there are some."""
    if steps is None:
        return floats
    by_run = b.reshape(b("Cast", steps, to=TensorProto.FLOAT), steps.size(0), floats.size(1), -1)
    return b.reshape(b("Mul", by_run, b.unsqueeze(floats, 2)), steps.size(0), steps.size(1))


def code_numbers(b: Body, codes: Operand, format: str) -> str:
    """The numbers that codes represent before they are scaled, in fp32."""
    table = CODE_FORMATS[format].table
    if table is None:
        return b("Cast", codes, to=TensorProto.FLOAT)
    return b("Gather", b.constant(np.array(table, np.float32)), b("Cast", codes, to=TensorProto.INT32), axis=0)


def _scaled(b: Body, numbers: str, scales: Operand, rows: int, columns: int, groups: int) -> str:
    if groups == 1:
        return b("Mul", numbers, scales)
    grouped = b("Mul", b.reshape(numbers, rows, groups, -1), b.unsqueeze(scales, 2))
    return b.reshape(grouped, rows, columns)


def sparse_bitmask(b: Body, values: Value, masks: Value, columns: int) -> str:
    """The elements that masks say, with zeros between them."""
    return _expanded(b, values, masks, columns)


def sparse_codes(b: Body, values: Value, masks: Value, scales: Value, columns: int, format: str) -> str:
    """The numbers of sparse codes at the places of their masks."""
    numbers = _expanded(b, Value(code_numbers(b, values, format), scales.fake), masks, columns)
    return _scaled(b, numbers, scales, masks.size(0), columns, scales.size(1))


def _expanded(b: Body, values: Value, masks: Value, columns: int) -> str:
    """values[how many bits are set before], where a bit is set."""
    words = b("Cast", b.unsqueeze(masks, 2), to=TensorProto.UINT64)
    shifted = b("BitShift", words, b.constant(np.arange(MASK_BITS, dtype=np.uint64)), direction="RIGHT")
    bits = b("BitwiseAnd", shifted, b.constant(np.array(1, np.uint64)))
    kept = b.slice(b.reshape(b("Cast", bits, to=TensorProto.INT64), masks.size(0), -1), 1, 0, columns)
    before = b("Sub", b("CumSum", b.reshape(kept, -1), b.integer(0)), b.integer(1))
    gathered = b("Gather", values, b("Max", before, b.integer(0)), axis=0)
    return b("Where", b("Cast", kept, to=TensorProto.BOOL), b.reshape(gathered, -1, columns), b.number(0.0))


def round_tokens(b: Body, x: Value, scale: Value | None, format: str, group: int | None) -> str:
    """Round each token's channels to codes with one scale, or one per group of them, and back."""
    if group is None:
        return _rounded(b, x, scale, format)
    channels, leading = x.size(-1), len(x.shape) - 1
    missing = -channels % group
    padded: Operand = b("Pad", x, b.integers([*[0] * (2 * leading + 1), missing])) if missing else x
    grouped = b.reshape(padded, *[0] * leading, (channels + missing) // group, group)
    rounded = b.reshape(_rounded(b, grouped, None, format), *[0] * leading, channels + missing)
    return b.slice(rounded, leading, 0, channels) if missing else rounded


def _rounded(b: Body, x: Operand, scale: Value | None, format: str) -> str:
    """The same along the last axis, with one scale."""
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
