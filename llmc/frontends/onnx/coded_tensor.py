"""A weight that is codes: which initializers hold them, and what an operator says of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.onnx.model import OnnxGraph, OnnxNode
from llmc.frontends.onnx.tensors import OnnxTensor

FORMATS: Mapping[int, str] = MappingProxyType({2: "int4", 4: "int4", 8: "int8"})


@dataclass(frozen=True)
class CodedTensor:
    """A weight of codes in an ONNX file. op: whose codes they are. rows, columns: the numbers of rows and columns of
    the weight [out, in], with the rows of all experts. block: columns that share a scale. is_turned: whether the codes
    are stored [in, out]. own_format: the code format, where llmc exported it. others: further parts of such codes, by
    their names in CODE_PARTS."""

    op: str
    codes: OnnxTensor
    scales: OnnxTensor
    zeros: OnnxTensor | None
    bits: int
    rows: int
    columns: int
    block: int
    is_turned: bool = False
    own_format: str | None = None
    others: Mapping[str, OnnxTensor] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """The code format in llmc; two bits are stored in four."""
        return self.own_format or FORMATS[self.bits]

    @property
    def parts(self) -> tuple[OnnxTensor, ...]:
        """All tensors in which the weight is stored."""
        return tuple(part for part in (self.codes, self.scales, self.zeros, *self.others.values()) if part is not None)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.columns // self.block)

    def of_equal_runs(self, values: Tensor) -> Tensor:
        """Scales or zeros [rows, groups], as those of runs of equal length: where columns end within a block, of the
        longest that both are multiples of."""
        width = self.block if self.columns % self.block == 0 else math.gcd(self.block, self.columns)
        return values[:, torch.arange(0, self.columns, width) // self.block].contiguous()


def whole(node: OnnxNode, name: str, default: int | None = None, *, least: int = 1) -> int:
    """An attribute that is a whole number, of 31 bits at most."""
    number = node.attributes.get(name, default)
    if not isinstance(number, int) or not least <= number < 1 << 31:
        raise unfit(node, f"its attribute {name} is {number!r:.40}")
    return number


def initializer(node: OnnxNode, graph: OnnxGraph, index: int) -> OnnxTensor:
    """A node's input that must be an initializer. Raises CaptureError if it is not one."""
    name = node.inputs[index] if index < len(node.inputs) else ""
    tensor = graph.tensors.get(name)
    if tensor is None:
        raise unfit(node, f"its input {index}, {name!r:.80}, is not an initializer")
    return tensor


def optional_initializer(node: OnnxNode, graph: OnnxGraph, index: int) -> OnnxTensor | None:
    """A node's optional input, an initializer; None if it was left out."""
    return initializer(node, graph, index) if index < len(node.inputs) and node.inputs[index] else None


def unfit(node: OnnxNode, problem: str) -> CheckpointError:
    """The error about a node's codes."""
    return CheckpointError(
        f"{node.label}: {problem}",
        at=node.op,
        fix="quantize the model again, for CPUs: codes of 2, 4 or 8 bits as the operator's documentation has them",
    )
