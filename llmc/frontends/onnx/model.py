"""An ONNX file as plain data: graphs, nodes, functions and tensors, checked as far as goes without their meaning.

The onnx package, an extra, reads the protobuf of a file and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.onnx.tensors import DOWNLOAD_AGAIN, OnnxTensor, damaged, read_tensor, utf8

_MOST_NODES = 1 << 20
_MOST_DEPTH = 8
# protobuf's own limit, which writers of larger models keep by external data.
_MOST_BYTES = 1 << 31
# A function of the model: its domain, name and overload.
Function = tuple[str, str, str]


@dataclass(frozen=True)
class OnnxNode:
    """A node of an ONNX graph. attributes: numbers, texts, tuples of them, OnnxTensor or OnnxGraph. A name that is
    empty is left out."""

    name: str
    domain: str
    op_type: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def op(self) -> str:
        """The operator with its domain, such as com.microsoft::MatMulNBits."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    @property
    def function(self) -> Function:
        """The key of the model's own function that it would call."""
        return self.domain, self.op_type, self.overload

    @property
    def label(self) -> str:
        """The node's name in messages."""
        return f"node {self.name or next(iter(self.outputs), '')!r:.120} ({self.op:.80})"


@dataclass(frozen=True)
class OnnxValue:
    """An input or output of a graph. type: ONNX's number. shape: sizes, names of sizes, None if the file does not give
    it."""

    name: str
    type: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class OnnxGraph:
    """A graph of an ONNX file. tensors: initializers by name. inputs: those that are not initializers."""

    nodes: tuple[OnnxNode, ...]
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    tensors: Mapping[str, OnnxTensor]


@dataclass(frozen=True)
class OnnxFunction:
    """A function of an ONNX file. attributes: defaults by name, None for those without."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    nodes: tuple[OnnxNode, ...]
    opsets: Mapping[str, int]


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX file. functions: the model's own functions, by domain, name and overload. opsets: versions by domain.
    metadata: by key."""

    file: Path
    graph: OnnxGraph
    functions: Mapping[Function, OnnxFunction]
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Reference:
    """In a function's node: the attribute of the call whose value it takes."""

    name: str


def read_model(file: Path) -> OnnxModel:
    """The model of a file; data of tensors are not read. Raises CheckpointError."""
    proto = _parsed(file)
    reader = _Reader(file)
    functions: dict[Function, OnnxFunction] = {}
    for function in proto.functions:
        key = (reader.domain(function.domain), reader.text(function.name), reader.text(function.overload))
        if key in functions:
            raise damaged(f"function {function.name!r:.80} appears twice", file)
        functions[key] = reader.function(function)
    graph = reader.graph(proto.graph, 0)
    if not graph.nodes:
        raise damaged("its graph has no nodes", file)
    metadata = {reader.text(prop.key): reader.text(prop.value) for prop in proto.metadata_props}
    return OnnxModel(file, graph, functions, reader.opsets(proto), metadata)


def _parsed(file: Path) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise CheckpointError(
            f"reading an ONNX model needs the onnx package: {error}", at=file, fix='pip install "llmc-compiler[onnx]"'
        ) from error
    if not file.is_file():
        kind = "no regular file" if file.exists() else "no such file"
        raise CheckpointError(kind, at=file, fix="name an .onnx file, or the directory that holds one")
    try:
        size = file.stat().st_size
        if size >= _MOST_BYTES:
            raise CheckpointError(
                f"the file has {size} bytes, more than protobuf reads (2 GiB)",
                at=file,
                fix="export it with external data: onnx.save(model, FILE, save_as_external_data=True)",
            )
        return onnx.ModelProto.FromString(file.read_bytes())
    except _decode_error() as error:
        raise CheckpointError(f"not an ONNX file, or damaged: {error}", at=file, fix=DOWNLOAD_AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"cannot read it: {error.strerror}", at=file, fix="check its permissions") from None


def _decode_error() -> Any:
    """The exception of protobuf, which has no type stubs. protobuf is installed with onnx."""
    return import_module("google.protobuf.message").DecodeError


class _Reader:
    """Counts what it has read: nodes of all graphs together."""

    def __init__(self, file: Path) -> None:
        self._file, self._nodes = file, 0

    def graph(self, proto: Any, depth: int) -> OnnxGraph:
        """depth: how deeply this graph is nested in nodes of other graphs."""
        if depth > _MOST_DEPTH:
            raise damaged(f"graphs are nested more than {_MOST_DEPTH} deep", self._file)
        if len(proto.sparse_initializer):
            raise CheckpointError(
                "the model has sparse initializers, which llmc does not read", at=self._file, fix="store them dense"
            )
        tensors: dict[str, OnnxTensor] = {}
        for initializer in proto.initializer:
            if not initializer.name or initializer.name in tensors:
                raise damaged(f"tensor {initializer.name!r:.80} appears twice, or has no name", self._file)
            tensors[initializer.name] = read_tensor(initializer, self._file)
        values = tuple(self._value(input_) for input_ in proto.input if input_.name not in tensors)
        return OnnxGraph(self.nodes(proto.node, depth), values, tuple(map(self._value, proto.output)), tensors)

    def function(self, proto: Any) -> OnnxFunction:
        """A model-local one."""
        attributes: dict[str, Any] = dict.fromkeys(self._texts(proto.attribute))
        attributes |= {self.text(attribute.name): self._attribute(attribute, 1) for attribute in proto.attribute_proto}
        return OnnxFunction(
            self._texts(proto.input),
            self._texts(proto.output),
            attributes,
            self.nodes(proto.node, 1),
            self.opsets(proto),
        )

    def nodes(self, protos: Any, depth: int) -> tuple[OnnxNode, ...]:
        """The nodes of a graph or function."""
        self._nodes += len(protos)
        if self._nodes > _MOST_NODES:
            raise damaged(f"it has more than {_MOST_NODES} nodes", self._file)
        return tuple(
            OnnxNode(
                self.text(proto.name),
                self.domain(proto.domain),
                self.text(proto.op_type),
                self.text(proto.overload),
                self._texts(proto.input),
                self._texts(proto.output),
                {self.text(attribute.name): self._attribute(attribute, depth) for attribute in proto.attribute},
            )
            for proto in protos
        )

    def text(self, value: str | bytes) -> str:
        """A name."""
        return utf8(value, self._file)

    def domain(self, value: str | bytes) -> str:
        """The standard's by its shorter name."""
        name = self.text(value)
        return "" if name == "ai.onnx" else name

    def opsets(self, proto: Any) -> dict[str, int]:
        """Versions by domain."""
        return {self.domain(opset.domain): opset.version for opset in proto.opset_import}

    def _texts(self, values: Any) -> tuple[str, ...]:
        return tuple(map(self.text, values))

    def _value(self, proto: Any) -> OnnxValue:
        kind = proto.type.tensor_type
        is_tensor = proto.type.HasField("tensor_type")
        shape: tuple[int | str | None, ...] | None = None
        if is_tensor and kind.HasField("shape"):
            shape = tuple(self._size(dim) for dim in kind.shape.dim)
        return OnnxValue(self.text(proto.name), kind.elem_type if is_tensor else 0, shape)

    def _size(self, dim: Any) -> int | str | None:
        return int(dim.dim_value) if dim.HasField("dim_value") else self.text(dim.dim_param) or None

    def _attribute(self, proto: Any, depth: int) -> Any:
        if proto.ref_attr_name:
            return Reference(self.text(proto.ref_attr_name))
        single = {1: "f", 2: "i"}.get(proto.type)
        if single is not None:
            return getattr(proto, single)
        if proto.type == 3:
            return _text(proto.s)
        if proto.type == 4:
            return read_tensor(proto.t, self._file)
        if proto.type == 5:
            return self.graph(proto.g, depth + 1)
        several = {6: "floats", 7: "ints"}.get(proto.type)
        if several is not None:
            return tuple(getattr(proto, several))
        if proto.type == 8:
            return tuple(map(_text, proto.strings))
        name = self.text(proto.name)
        raise damaged(f"attribute {name!r:.80} has type {proto.type}, which llmc does not read", self._file)


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")
