"""Weights that llmc's own function `dequantize` makes of stored codes, as `llmc export` writes those of GGUF files and
of quantized checkpoints. They are read bit by bit."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from llmc.formats.code_format import CODE_FORMATS, CODE_PARTS
from llmc.frontends.onnx.coded_tensor import CodedTensor, initializer, unfit
from llmc.frontends.onnx.model import Function, OnnxFunction, OnnxGraph, OnnxNode
from llmc.frontends.onnx.tensors import OnnxTensor
from llmc.graph.code_numbers import code_dtype
from llmc.graph.stored_codes import UnpackedCodes

DEQUANTIZE = "dequantize"


def own_weight(
    node: OnnxNode, graph: OnnxGraph, functions: Mapping[Function, OnnxFunction]
) -> Iterator[tuple[str, CodedTensor]]:
    """The weight, by the name of its codes. Raises CheckpointError for parts that do not fit together."""
    function = functions.get(node.function)
    names = CODE_PARTS if function is None else function.inputs
    parts = {name: initializer(node, graph, index) for index, name in enumerate(names) if index < len(node.inputs)}
    format = node.attributes.get("format")
    known = CODE_FORMATS.get(format) if isinstance(format, str) else None
    if known is None or parts.keys() - set(CODE_PARTS) or not {"codes", "scales"} <= parts.keys():
        raise unfit(node, f"its format is {format!r:.40}, its parts are {', '.join(sorted(parts))}")
    codes, scales = parts.pop("codes"), parts.pop("scales")
    if len(codes.shape) != 2 or len(scales.shape) != 2 or not codes.numel or not scales.numel:
        raise unfit(node, f"its codes are {list(codes.shape)}, its scales {list(scales.shape)}: expected two matrices")
    rows, columns = codes.shape
    if not scales.dtype.is_floating_point:
        raise unfit(node, f"its scales are {scales.packed or scales.dtype}")
    if scales.shape[0] not in (1, rows) or columns % scales.shape[1]:
        raise unfit(node, f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    for name, part in parts.items():
        if len(part.shape) != 2 or part.shape[0] not in (1, rows) or columns % max(part.shape[1], 1):
            raise unfit(node, f"its {name} {list(part.shape)} do not fit codes {list(codes.shape)}")
    block = columns // scales.shape[1]
    zeros = parts.pop("zeros", None)
    yield (
        node.inputs[0],
        CodedTensor(
            DEQUANTIZE, codes, scales, zeros, known.bits, rows, columns, block, own_format=format, others=parts
        ),
    )


def own_codes(coded: CodedTensor) -> UnpackedCodes:
    """Return all parts as they are stored."""
    others = {name: _numbers(part) for name, part in coded.others.items()}
    zeros = None if coded.zeros is None else _numbers(coded.zeros)
    codes = _numbers(coded.codes).view(code_dtype(coded.format))
    return UnpackedCodes(codes, _numbers(coded.scales), zeros, **others)


def _numbers(tensor: OnnxTensor) -> Tensor:
    stored = tensor.load()
    if stored.dtype is torch.float32:
        return _narrow(stored)
    if tensor.packed is None:
        return stored.view(torch.int8)
    low_first = torch.stack((stored & 15, stored >> 4), -1).flatten()[: tensor.numel].view(torch.int8)
    signed = (low_first ^ 8) - 8 if tensor.packed == "int4" else low_first
    return signed.reshape(tensor.shape)


def _narrow(values: Tensor) -> Tensor:
    """Scales and minima in the half precision that they were stored in before the export made them fp32."""
    for dtype in (torch.float16, torch.bfloat16):
        half = values.to(dtype)
        if torch.equal(half.float(), values):
            return half
    return values
