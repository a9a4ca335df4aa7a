"""How a graph's weights are stored for ONNX: numbers as fp32, codes as they are, those of four bits two in a byte."""

from dataclasses import dataclass
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor, fx

from llmc.codegen.onnx.types import onnx_type
from llmc.codegen.plain_rows import plain_rows
from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.call_arguments import call_arguments
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.model_graph import ModelGraph
from llmc.program import Layout, WeightSlot

llmc = torch.ops.llmc
# Which arguments of an op are codes of its format.
_CODES: dict[Any, tuple[str, ...]] = {
    llmc.dequantize.default: ("codes", "zeros"),
    llmc.sparse_codes.default: ("values",),
}


@dataclass(frozen=True)
class OnnxWeight:
    """A weight as ONNX stores it. element: the element type, as ONNX numbers it. slot: the weight's place and layout in
    a file."""

    element: int
    slot: WeightSlot


def onnx_weights(graph: ModelGraph) -> tuple[OnnxWeight, ...]:
    """Return all weights in the order of their placeholders."""
    return tuple(_stored(node) for node in graph.weight_nodes())


def _stored(node: fx.Node) -> OnnxWeight:
    value: Tensor = node.meta["val"]
    shape, count = tuple(map(int, value.shape)), int(value.numel())
    element = _element(node)
    if element in (TensorProto.INT4, TensorProto.UINT4):
        return OnnxWeight(element, WeightSlot(node.name, "U8", shape, Layout.NIBBLES, -(-count // 2)))
    dtype = torch.float32 if value.dtype.is_floating_point else value.dtype
    slot = WeightSlot(node.name, DTYPE_NAMES[dtype], shape, Layout.ROWS, count * dtype.itemsize)
    return OnnxWeight(element, slot)


def _element(node: fx.Node) -> int:
    """The layout of its dtype, or of the codes that all its readers expect."""
    formats = {_format(user, node) for user in node.users}
    format = formats.pop() if len(formats) == 1 else None
    if format is None:
        return onnx_type(node.meta["val"].dtype)
    codes = CODE_FORMATS[format]
    if codes.bits == 4:
        return TensorProto.INT4 if codes.integers is not None and codes.integers[0] < 0 else TensorProto.UINT4
    return TensorProto.FLOAT8E4M3FN if format == "fp8" else onnx_type(node.meta["val"].dtype)


def _format(user: fx.Node, node: fx.Node) -> str | None:
    arguments = call_arguments(user)
    if any(arguments[name] is node for name in _CODES.get(user.target, ())):
        return str(arguments["format"])
    return None


def stored_elements(weight: Tensor, slot: WeightSlot) -> Tensor:
    """A weight as its slot holds it: 1-D, contiguous."""
    flat = weight.reshape(-1)
    if slot.layout is not Layout.NIBBLES:
        return plain_rows(weight, slot)
    low = flat.view(torch.uint8) & 15
    if len(low) % 2:
        low = torch.nn.functional.pad(low, (0, 1))
    return low[0::2] | (low[1::2] << 4)
