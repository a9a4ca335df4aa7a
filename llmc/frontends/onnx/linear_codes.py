"""Weights that DequantizeLinear makes of stored codes: int8, uint8, int4 or uint4, a scale for the tensor, for each
output channel, or for blocks of an output channel's columns.

A product reads a matrix [in, out] or [out, in]: which of the two it is, is said by the axis that scales go along.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from llmc.frontends.onnx.coded_tensor import CodedTensor, initializer, optional_initializer, unfit, whole
from llmc.frontends.onnx.model import OnnxGraph, OnnxNode
from llmc.frontends.onnx.tensors import OnnxTensor
from llmc.graph.stored_codes import UnpackedCodes

LINEAR = "DequantizeLinear"


def linear_weight(
    node: OnnxNode, graph: OnnxGraph, made_by: Mapping[str, OnnxNode]
) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the weight that a DequantizeLinear makes, by the name of its codes. Raises CaptureError for other forms."""
    codes, scales = (initializer(node, graph, index) for index in (0, 1))
    zeros = optional_initializer(node, graph, 2)
    if len(codes.shape) != 2 or not codes.numel or _bits(codes) is None or not scales.dtype.is_floating_point:
        kind = codes.packed or codes.dtype
        raise unfit(node, f"{codes.name!r:.80} is {list(codes.shape)} of {kind}, no matrix of 4- or 8-bit codes")
    is_turned = has_columns_first(node)
    rows, columns = reversed(codes.shape) if is_turned else codes.shape
    block = whole(node, "block_size", 0, least=0) or columns
    coded = CodedTensor(LINEAR, codes, scales, zeros, _bits(codes) or 8, rows, columns, block, is_turned)
    for part in (scales, zeros):
        if part is not None and part.numel not in (1, rows * coded.groups):
            expected = f"a weight {[rows, columns]} in blocks of {block} has {rows * coded.groups}"
            raise unfit(node, f"{part.name!r:.80} has {part.numel} elements, {expected}")
    if zeros is not None and (zeros.dtype, zeros.packed) != (codes.dtype, codes.packed):
        raise unfit(node, f"its zeros are {zeros.packed or zeros.dtype}, its codes {codes.packed or codes.dtype}")
    yield node.inputs[0], coded


def has_columns_first(node: OnnxNode) -> bool:
    """Whether the matrix is [in, out]. Blocks are runs along the inputs; else each output has a scale."""
    along = whole(node, "axis", 1, least=-2) % 2
    return along == (0 if whole(node, "block_size", 0, least=0) else 1)


def linear_codes(coded: CodedTensor) -> UnpackedCodes:
    """Return all parts; unsigned codes have the middle of their range subtracted."""
    stored = _numbers(coded.codes)
    zeros = None if coded.zeros is None else _numbers(coded.zeros)
    is_signed = coded.codes.packed == "int4" or coded.codes.dtype is torch.int8
    if zeros is None and not is_signed:
        zeros = torch.full((1,), -(1 << (coded.bits - 1)), dtype=torch.int8)
    offsets = None if zeros is None or not bool(zeros.any()) else coded.of_equal_runs(_of_rows(coded, zeros))
    scales = coded.of_equal_runs(_of_rows(coded, coded.scales.load()))
    return UnpackedCodes((stored.t() if coded.is_turned else stored).contiguous(), scales, offsets)


def _of_rows(coded: CodedTensor, values: Tensor) -> Tensor:
    """Scales or zeros as [rows, groups]."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(coded.rows, coded.groups)
    return values.reshape(coded.groups, coded.rows).t() if coded.is_turned else values.reshape(coded.rows, coded.groups)


def _numbers(tensor: OnnxTensor) -> Tensor:
    """int8, of four bits too."""
    stored = tensor.load()
    if tensor.packed is not None:
        pairs = torch.stack((stored & 15, stored >> 4), -1).flatten()[: tensor.numel].to(torch.int8)
        stored = (pairs ^ 8) - 8 if tensor.packed == "int4" else pairs - 8
        return stored.reshape(tensor.shape)
    return stored if stored.dtype is torch.int8 else (stored.to(torch.int16) - 128).to(torch.int8)


def _bits(codes: OnnxTensor) -> int | None:
    if codes.packed is not None:
        return 4
    return 8 if codes.dtype in (torch.int8, torch.uint8) else None
