"""onnxruntime's own operators, in the form of its model builder: weights of codes, and norms of sums.

    linear(x, dequantize(codes, scales, zeros), bias)   ->   MatMulNBits(x, codes, scales, zeros, bias)
    y = rms_norm(s = a + b, weight)                     ->   y, s = SkipSimplifiedLayerNormalization(a, b, weight)
Must have: codes of 4 or 8 bits in blocks of a power of two from 16 on, that nothing else reads; a norm with a weight.
Other nodes are left unchanged in the standard model. MatMulNBits has codes without a sign, packed row by row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx

from llmc.codegen.onnx.weights import OnnxWeight
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.program import Layout, WeightSlot

CONTRIB = "com.microsoft"
_LEAST_BLOCK = 16
_BITS = {"int4": 4, "int8": 8}
# Only products that MatMulNBits computes: others remain functions of standard ops.
_PRODUCTS = (torch.ops.llmc.linear.default, torch.ops.llmc.lm_head.default)
_DEQUANTIZE = torch.ops.llmc.dequantize.default
# That it does not round tokens to 8 bits.
_IN_SINGLE_PRECISION = 1


@dataclass(frozen=True)
class CodedProduct:
    """A product whose weight is codes. product: the call that multiplies. parts: codes, scales and, if there are
    some, zeros."""

    product: fx.Node
    dequantize: fx.Node
    parts: tuple[fx.Node, ...]
    bits: int
    block: int

    @property
    def packed(self) -> Iterator[fx.Node]:
        """The parts whose bytes MatMulNBits has otherwise."""
        yield self.parts[0]
        yield from self.parts[2:]


def coded_products(graph: ModelGraph) -> tuple[CodedProduct, ...]:
    """The products that MatMulNBits can say."""
    nodes = (node for node in graph.graph.nodes if node.target in _PRODUCTS)
    return tuple(product for node in nodes if (product := _coded_product(node)) is not None)


def _coded_product(node: fx.Node) -> CodedProduct | None:
    arguments = call_arguments(node)
    weight, x = arguments["weight"], arguments["x"].meta["val"]
    if weight.target is not _DEQUANTIZE or len(weight.users) != 1 or x.dim() != 2:
        return None
    stored = call_arguments(weight)
    parts = tuple(stored[name] for name in ("codes", "scales", "zeros") if stored[name] is not None)
    columns, groups = (int(part.meta["val"].shape[1]) for part in parts[:2])
    block, bits = columns // groups, _BITS.get(stored["format"])
    is_whole = block >= _LEAST_BLOCK and block & (block - 1) == 0 and all(len(part.users) == 1 for part in parts)
    return CodedProduct(node, weight, parts, bits, block) if bits is not None and is_whole else None


def packed_weight(weight: OnnxWeight, bits: int) -> OnnxWeight:
    """Return codes or zeros [rows, columns] as a weight of the file: bytes, packed along each row."""
    rows, columns = weight.slot.shape
    width = -(-columns * bits // 8)
    return OnnxWeight(TensorProto.UINT8, WeightSlot(weight.slot.name, "U8", (rows, width), Layout.ROWS, rows * width))


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes or zeros [rows, columns] for MatMulNBits: unsigned, two 4-bit numbers per byte."""
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 8:
        return unsigned.contiguous()
    pairs = torch.nn.functional.pad(unsigned, (0, unsigned.shape[1] % 2))
    return (pairs[:, 0::2] | (pairs[:, 1::2] << 4)).contiguous()


def use_contrib_ops(model: onnx.ModelProto, graph: ModelGraph) -> None:
    """Put onnxruntime's operators in the place of calls. The initializers of codes are packed already."""
    products = coded_products(graph)
    gone = {coded.dequantize.name for coded in products}
    placed: dict[str, onnx.NodeProto] = {coded.product.name: _matmul_nbits(coded) for coded in products}
    for norm, total in _norms_of_sums(graph):
        gone.add(norm.name)
        placed[total.name] = _skip_norm(norm, total)
    nodes = [placed.get(node.name, node) for node in model.graph.node if node.name not in gone]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    for product in products:
        codes = by_name[product.parts[0].name]
        rows, width = codes.dims
        codes.dims[:] = [rows, width * 8 // (product.block * product.bits), product.block * product.bits // 8]


def _matmul_nbits(product: CodedProduct) -> onnx.NodeProto:
    arguments = call_arguments(product.product)
    rows, columns = map(int, product.parts[0].meta["val"].shape)
    zeros = product.parts[2].name if len(product.parts) > 2 else ""
    inputs = [arguments["x"].name, product.parts[0].name, product.parts[1].name, zeros]
    if arguments["bias"] is not None:
        inputs += ["", arguments["bias"].name]
    return helper.make_node(
        "MatMulNBits",
        inputs,
        [product.product.name],
        name=product.product.name,
        domain=CONTRIB,
        K=columns,
        N=rows,
        bits=product.bits,
        block_size=product.block,
        accuracy_level=_IN_SINGLE_PRECISION,
    )


def _norms_of_sums(graph: ModelGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Norms, and the sums of two values of one shape that they are of; of each sum the first."""
    seen = set[fx.Node]()
    for norm in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.rms_norm.default):
        arguments = call_arguments(norm)
        total: Any = arguments["x"]
        if total.target is not torch.ops.aten.add.Tensor or total in seen or arguments["weight"] is None:
            continue
        terms = call_arguments(total)
        operands = [terms["self"], terms["other"]]
        shape = total.meta["val"].shape
        if terms["alpha"] == 1 and all(isinstance(n, fx.Node) and n.meta["val"].shape == shape for n in operands):
            seen.add(total)
            yield norm, total


def _skip_norm(norm: fx.Node, total: fx.Node) -> onnx.NodeProto:
    arguments, terms = call_arguments(norm), call_arguments(total)
    return helper.make_node(
        "SkipSimplifiedLayerNormalization",
        [terms["self"].name, terms["other"].name, arguments["weight"].name],
        [norm.name, "", "", total.name],
        name=norm.name,
        domain=CONTRIB,
        epsilon=arguments["eps"],
    )
