"""Weights that are codes: which initializers are, and what MatMulNBits, GatherBlockQuantized and QMoE make of them.

Their codes are unsigned, packed low bits first along the rows [out, in / block, block], and stand for
(code - zero) · scale, zero the middle of the range where none is given. Codes of DequantizeLinear are in
linear_codes.py, those of llmc's own exports in own_codes.py. Here they become what llmc/ops/weight_codes.py
describes, bit by bit. Source: onnxruntime's ContribOperators.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.onnx.coded_tensor import FORMATS, CodedTensor, initializer, optional_initializer, unfit, whole
from llmc.frontends.onnx.linear_codes import LINEAR, linear_codes, linear_weight
from llmc.frontends.onnx.model import Function, OnnxFunction, OnnxGraph, OnnxNode
from llmc.frontends.onnx.own_codes import DEQUANTIZE, own_codes, own_weight
from llmc.frontends.onnx.tensors import OnnxTensor
from llmc.graph.stored_codes import UnpackedCodes


def coded_tensors(graph: OnnxGraph, functions: Mapping[Function, OnnxFunction]) -> dict[str, CodedTensor]:
    """Return the weights that are stored as codes, by the name of the value that represents each: an initializer, or
    the reshape of one.

    functions: the model's own.

    Raises CheckpointError for codes that do not fit together, or that are kept in a way that is not read.
    """
    made_by = {output: node for node in graph.nodes for output in node.outputs}
    tensors: dict[str, CodedTensor] = {}
    for node in graph.nodes:
        if (node.domain, node.op_type) == ("llmc", DEQUANTIZE):
            weights = own_weight(node, graph, functions)
        elif (finder := _FINDERS.get((node.domain, node.op_type))) is not None:
            weights = finder(node, graph, made_by)
        else:
            continue
        for name, coded in weights:
            if tensors.setdefault(name, coded) != coded and replace(tensors[name], op=coded.op) != coded:
                raise unfit(node, f"the codes {name!r:.80} are read in two ways")
    return tensors


def unpacked(coded: CodedTensor) -> UnpackedCodes:
    """Return all parts of the codes. Raises CheckpointError if the file has changed, or if zeros are not codes."""
    if coded.op == LINEAR:
        return linear_codes(coded)
    if coded.op == DEQUANTIZE:
        return own_codes(coded)
    middle = 1 << (coded.bits - 1)
    packed = coded.codes.load().reshape(coded.rows, -1)
    codes = _unpacked(packed, coded.bits)[:, : coded.columns] - middle
    scales = coded.scales.load().reshape(coded.rows, coded.groups)
    zeros = None if coded.zeros is None else _zeros(coded, coded.zeros, coded.groups, middle)
    zeros = None if zeros is None or not bool(zeros.any()) else coded.of_equal_runs(zeros)
    return UnpackedCodes(codes.to(torch.int8).contiguous(), coded.of_equal_runs(scales), zeros)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unsigned numbers along the last axis, the low bits first; int16."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2).to(torch.int16)


def _zeros(coded: CodedTensor, tensor: OnnxTensor, groups: int, middle: int) -> Tensor:
    stored = tensor.load()
    if not stored.is_floating_point():
        return (_unpacked(stored.reshape(coded.rows, -1), coded.bits)[:, :groups] - middle).to(torch.int8)
    values = stored.reshape(coded.rows, groups).float()
    whole = values.round()
    if not torch.equal(values, whole) or bool(((whole < 0) | (whole >= 2 * middle)).any()):
        raise CheckpointError(
            f"the zero points {tensor.name!r:.80} are not codes: one is {float(values[values != whole][:1].sum())}",
            at=tensor.file,
            fix="quantize the model with whole zero points",
        )
    return (whole - middle).to(torch.int8)


def _matmul(node: OnnxNode, graph: OnnxGraph, made_by: Mapping[str, OnnxNode]) -> Iterator[tuple[str, CodedTensor]]:
    if node.attributes.get("weight_prepacked", 0):
        raise unfit(node, "its codes are packed for one kind of GPU (weight_prepacked)")
    if len(node.inputs) > 4 and node.inputs[4]:
        raise unfit(node, "its columns are permuted (g_idx)")
    rows, columns, block, bits = (whole(node, name) for name in ("N", "K", "block_size", "bits"))
    parts = [initializer(node, graph, index) for index in (1, 2)]
    zeros = optional_initializer(node, graph, 3)
    yield node.inputs[1], _checked(node, parts[0], parts[1], zeros, bits, rows, columns, block)


def _lookup(node: OnnxNode, graph: OnnxGraph, made_by: Mapping[str, OnnxNode]) -> Iterator[tuple[str, CodedTensor]]:
    data, name = node.inputs[0], node.inputs[0]
    while data not in graph.tensors and made_by.get(data) is not None and made_by[data].op == "Reshape":
        data = made_by[data].inputs[0]
    if data not in graph.tensors:
        raise unfit(node, f"its table {name!r:.80} is not an initializer")
    codes, scales = graph.tensors[data], initializer(node, graph, 2)
    zeros = optional_initializer(node, graph, 3)
    bits, block = whole(node, "bits", 4), whole(node, "block_size", 128)
    axis = node.attributes.get("quantize_axis", 1)
    if codes.packed is not None or codes.dtype is not torch.uint8 or axis not in (1, -1) or len(scales.shape) != 2:
        raise unfit(node, f"its table is of {codes.packed or codes.dtype}, quantized along axis {axis}")
    rows = scales.shape[0]
    columns = codes.numel * (8 // bits if bits in FORMATS else 1) // max(rows, 1)
    yield name, _checked(node, codes, scales, zeros, bits, rows, columns, block)


def _experts(node: OnnxNode, graph: OnnxGraph, made_by: Mapping[str, OnnxNode]) -> Iterator[tuple[str, CodedTensor]]:
    if node.attributes.get("quant_type", "int") != "int":
        raise unfit(node, f"its weights are {node.attributes['quant_type']!r:.40}")
    if node.attributes.get("weights_prepacked", -1) == 1:
        raise unfit(node, "its codes are packed for one kind of GPU (weights_prepacked)")
    for number, at in enumerate((2, 5, 8)):
        if len(node.inputs) <= at or not node.inputs[at]:
            continue
        codes, scales = initializer(node, graph, at), initializer(node, graph, at + 1)
        zeros = optional_initializer(node, graph, 11 + number)
        bits = whole(node, f"fc{number + 1}_expert_weight_bits", whole(node, "expert_weight_bits", 4))
        if len(codes.shape) != 3 or bits not in FORMATS:
            raise unfit(node, f"its weight {codes.name!r:.80} is {list(codes.shape)} of {bits} bits")
        rows, columns = codes.shape[0] * codes.shape[1], codes.shape[2] * (8 // bits)
        block = node.attributes.get("block_size", 0)
        width = block if isinstance(block, int) and block > 0 else columns
        yield node.inputs[at], _checked(node, codes, scales, zeros, bits, rows, columns, width)


def _checked(
    node: OnnxNode,
    codes: OnnxTensor,
    scales: OnnxTensor,
    zeros: OnnxTensor | None,
    bits: int,
    rows: int,
    columns: int,
    block: int,
) -> CodedTensor:
    if bits not in FORMATS:
        raise unfit(node, f"its codes have {bits} bits, expected {', '.join(map(str, FORMATS))}")
    groups = -(-columns // block)
    blocks = rows * groups
    expected = {
        codes.name: (codes.numel, (blocks * block if node.op_type == "MatMulNBits" else rows * columns) * bits // 8),
        scales.name: (scales.numel, blocks),
    }
    if zeros is not None:
        packed = rows * -(-groups * bits // 8)
        expected[zeros.name] = (zeros.numel, blocks if zeros.dtype.is_floating_point else packed)
    for name, (actual, wanted) in expected.items():
        if actual != wanted:
            raise unfit(
                node,
                f"{name!r:.80} has {actual} elements, a weight {[rows, columns]} in blocks of {block} has {wanted}",
            )
    if codes.dtype is not torch.uint8 or not scales.dtype.is_floating_point or columns < 1 or rows < 1:
        raise unfit(node, f"its codes are {codes.dtype} and its scales {scales.dtype}")
    return CodedTensor(node.op_type, codes, scales, zeros, bits, rows, columns, block)


_FINDERS: Mapping[
    tuple[str, str], Callable[[OnnxNode, OnnxGraph, Mapping[str, OnnxNode]], Iterator[tuple[str, CodedTensor]]]
] = MappingProxyType(
    {
        ("", LINEAR): linear_weight,
        ("com.microsoft", "MatMulNBits"): _matmul,
        ("com.microsoft", "GatherBlockQuantized"): _lookup,
        ("com.microsoft", "QMoE"): _experts,
    }
)
