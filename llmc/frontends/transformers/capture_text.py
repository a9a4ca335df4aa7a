"""A captured graph as JSON text and back, with its fake values, source lines and constants.

Reading it takes a tenth of the time of tracing the model, and needs neither the model's code nor transformers. As in
graph/serialize.py the grammar is closed and nothing is evaluated. Graphs that it cannot express (sizes other than sums
and products of the token count, ops outside aten and llmc, large constants) are not written.
"""

import base64
import functools
import json
import operator
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from llmc.errors import EngineFormatError, LoweringError
from llmc.files.typed_json import from_json, to_json
from llmc.graph.dtype_names import DTYPE_NAMES, TORCH_DTYPES
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.serialize import add_node, decode_argument, encode_argument, node_record
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant, Derived, Recipe, Stored
from llmc.program import Head

_VERSION = 3
_MAX_CONSTANT_BYTES = 1 << 20
_OVERLOADS = ("aten", "llmc")
_BUILTINS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {f"operator.{name}": getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")}
)


# Dtypes of weights, and the complex dtype in which Llama 4 rotates queries and keys.
_TORCH_DTYPES = {**TORCH_DTYPES, "C64": torch.complex64}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


class _NotSayable(Exception):
    """The grammar has no words for it."""


def captured_text(graph: ModelGraph) -> str | None:
    """The text of a graph at stage captured; None for one that holds what the grammar lacks."""
    try:
        return json.dumps(_Writer(graph).content(), ensure_ascii=False, separators=(",", ":")) + "\n"
    except (_NotSayable, LoweringError):
        return None


def captured_graph(text: str, at: Path) -> ModelGraph:
    """The graph of a text that `captured_text` wrote. llmc.ops must have been imported. Raises EngineFormatError."""
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this llmc reads {_VERSION}")
        return _Reader(content).graph()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        raise EngineFormatError(f"the capture cannot be read: {error!r:.200}", at=at, fix="delete the file") from None


class _Writer:
    """Equal fake values and equal stack traces are written once."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        ids: Any = graph.inputs()[0].meta["val"]
        self._token_size: Any = ids.shape[-1]
        self._tokens: sympy.Symbol = self._token_size.node.expr
        self._values: dict[str, int] = {}
        self._traces: dict[str, int] = {}

    def content(self) -> dict[str, Any]:
        """The whole text as JSON."""
        if self._graph.stage is not Stage.CAPTURED or self._graph.caches or self._graph.quantized:
            raise _NotSayable
        known = self._graph.info
        info = asdict(known) | {"dtype": DTYPE_NAMES[known.dtype], "head": to_json(known.head)}
        nodes = [self._node(node) for node in self._graph.graph.nodes]
        return {
            "version": _VERSION,
            "info": info,
            "tokens": self._symbol(),
            "traces": list(self._traces),
            "values": [json.loads(text) for text in self._values],
            "nodes": nodes,
        }

    def _symbol(self) -> dict[str, Any]:
        env: ShapeEnv = self._token_size.node.shape_env
        if not isinstance(self._tokens, sympy.Symbol) or env.deferred_runtime_asserts:
            raise _NotSayable
        # Facts other than the range would be lost, including conclusions that passes draw from them. The equal length
        # of the inputs is not such a fact, because one symbol expresses it.
        if any(guard.expr.xreplace(env.replacements) is not sympy.true for guard in env.guards):
            raise _NotSayable
        known = env.var_to_range[self._tokens]
        upper = None if known.upper is int_oo else int(known.upper)
        return {"hint": int(env.backed_var_to_val[self._tokens]), "range": [int(known.lower), upper]}

    def _node(self, node: fx.Node) -> dict[str, Any]:
        record = node_record(node, _target_name, _encode)
        if node.name in self._graph.weights:
            record["recipe"] = _encode_recipe(self._graph.weights[node.name], node)
        if "val" in node.meta:
            text = json.dumps(self._value(node.meta["val"]))
            record["value"] = self._values.setdefault(text, len(self._values))
        if node.meta.get("stack_trace") is not None:
            record["trace"] = self._traces.setdefault(node.meta["stack_trace"], len(self._traces))
        if node.meta.keys() - {"val", "stack_trace"}:
            raise _NotSayable
        return record

    def _value(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, FakeTensor):
            if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype not in _NAMES:
                raise _NotSayable
            return {
                "dtype": _NAMES[value.dtype],
                "shape": [self._size(size) for size in value.shape],
                "stride": [self._size(size) for size in value.stride()],
                "offset": self._size(value.storage_offset()),
            }
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self._value(element) for element in value]}
        return {"size": self._size(value)}

    def _size(self, size: Any) -> Any:
        if isinstance(size, SymInt):
            return self._expression(size.node.expr)
        if type(size) is not int:
            raise _NotSayable
        return size

    def _expression(self, expression: sympy.Expr) -> Any:
        if expression == self._tokens:
            return "T"
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Add | sympy.Mul):
            sign = "+" if isinstance(expression, sympy.Add) else "*"
            return [sign, *(self._expression(argument) for argument in expression.args)]
        if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer) and expression.exp > 0:
            return ["*", *[self._expression(expression.base)] * int(expression.exp)]
        raise _NotSayable


class _Reader:
    """Nodes of one value share one fake tensor, as they do after the passes: nothing changes it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)
        lower, upper = content["tokens"]["range"]
        constraint = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(lower, int_oo if upper is None else upper))
        source, hint = ConstantSource("llmc_T"), content["tokens"]["hint"]
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint)
        self._tokens: Any = env.create_symintnode(symbol, hint=hint, source=source)
        self._values = [self._value(value) for value in content["values"]]

    def graph(self) -> ModelGraph:
        """The graph with all its nodes."""
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        weights: dict[str, Recipe] = {}
        for record in self._content["nodes"]:
            node = add_node(graph, nodes, record, _target, _decode)
            if "recipe" in record:
                weights[node.name] = _decode_recipe(record["recipe"])
            if "value" in record:
                node.meta["val"] = self._values[record["value"]]
            if "trace" in record:
                node.meta["stack_trace"] = self._content["traces"][record["trace"]]
        graph.lint()
        known = dict(self._content["info"])
        known |= {"dtype": TORCH_DTYPES[known["dtype"]], "eos_token_ids": tuple(known["eos_token_ids"])}
        known["head"] = None if known["head"] is None else from_json(Head, known["head"], "head")
        return ModelGraph(graph, Stage.CAPTURED, weights, ModelInfo(**known))

    def _value(self, value: Any) -> Any:
        if value is None:
            return None
        if "size" in value:
            return self._size(value["size"])
        if "dtype" not in value:
            ((kind, items),) = value.items()
            return {"list": list, "tuple": tuple}[kind](self._value(item) for item in items)
        shape, stride = (tuple(map(self._size, value[name])) for name in ("shape", "stride"))
        with self._mode:
            tensor = torch.empty_strided(shape, stride, dtype=_TORCH_DTYPES[value["dtype"]], device="cpu")
            if value["offset"] != 0:
                tensor = tensor.as_strided(shape, stride, self._size(value["offset"]))
        return tensor

    def _size(self, size: Any) -> Any:
        if size == "T":
            return self._tokens
        if isinstance(size, int):
            return size
        sign, *parts = size
        return functools.reduce({"+": operator.add, "*": operator.mul}[sign], map(self._size, parts))


def _target_name(target: Any) -> str:
    if isinstance(target, OpOverload) and target.namespace in _OVERLOADS:
        return str(target)
    name = f"operator.{getattr(target, '__name__', '')}"
    if _BUILTINS.get(name) is not target:
        raise _NotSayable
    return name


def _target(name: str) -> Callable[..., Any]:
    if name in _BUILTINS:
        return _BUILTINS[name]
    namespace, packet, overload = name.split(".")
    if namespace not in _OVERLOADS:
        raise ValueError(f"op {name!r}")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(op, OpOverload):
        raise ValueError(f"op {name!r}")
    return op


def _encode(value: Any, node: fx.Node) -> Any:
    """An argument of a node, or of a recipe, which may be another one."""
    if isinstance(value, Recipe):
        return {"recipe": _encode_recipe(value, node)}
    # fx tells tuples and lists apart when it compares and prints arguments.
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, node) for item in value]}
    if isinstance(value, list):
        return [_encode(item, node) for item in value]
    if isinstance(value, torch.device) and value.type != "cpu":
        raise _NotSayable
    return encode_argument(value, node)


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if isinstance(value, dict) and "recipe" in value:
        return _decode_recipe(value["recipe"])
    if isinstance(value, dict) and "tuple" in value:
        return tuple(_decode(item, nodes) for item in value["tuple"])
    return decode_argument(value, nodes)


def _encode_recipe(recipe: Recipe, node: fx.Node) -> dict[str, Any]:
    if isinstance(recipe, Stored):
        return {"stored": recipe.name, "dtype": DTYPE_NAMES[recipe.dtype]}
    if isinstance(recipe, Derived):
        args, kwargs = (_encode(part, node) for part in (recipe.args, recipe.kwargs))
        return {"derived": _target_name(recipe.target), "args": args, "kwargs": kwargs}
    if not isinstance(recipe, Constant) or recipe.value.nbytes > _MAX_CONSTANT_BYTES:
        raise _NotSayable
    value = recipe.value.contiguous()
    data = base64.b64encode(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"constant": data.decode("ascii"), "dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape)}


def _decode_recipe(record: dict[str, Any]) -> Recipe:
    if "derived" in record:
        target = _target(record["derived"])
        if not isinstance(target, OpOverload):
            raise ValueError(f"a weight made by {target!r}")
        return Derived(target, _decode(record["args"], {}), _decode(record["kwargs"], {}))
    dtype = TORCH_DTYPES[record["dtype"]]
    if "stored" in record:
        return Stored(record["stored"], dtype)
    data = bytearray(base64.b64decode(record["constant"], validate=True))
    value: Tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return Constant(value.reshape(record["shape"]))
