"""Fake values of nodes that rewrites added, and of new step inputs with symbolic sizes."""

from typing import Any

import torch
from torch import SymInt, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from llmc.errors import PassError
from llmc.graph.fake_value import fake_mode
from llmc.graph.model_graph import ModelGraph

# The example size of a new symbol; larger than 1, which shape logic treats as broadcast.
_HINT = 5


def propagate(graph: fx.Graph) -> None:
    """Set meta["val"] of each node that has none, by running it on its arguments' fake values.

    Raises PassError naming the node if it does not run.
    """
    missing = [n for n in graph.nodes if n.op != "output" and "val" not in n.meta]
    if not missing:
        return
    with fake_mode(graph), enable_python_dispatcher():
        for node in missing:
            if node.op != "call_function":
                raise PassError(f"{node.op} node {node.name} has no fake value", at=node.format_node())
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise PassError(f"{node.name} does not fit its inputs: {error}", at=node.format_node()) from error


def symbolic_input(graph: ModelGraph, name: str, dims: tuple[str | int, ...], dtype: torch.dtype) -> FakeTensor:
    """The fake value of a new step input `name`.

    dims: sizes; a string is a symbol, and equal strings are the same SymInt throughout the graph; "R+1" is R plus one.
    "T" is the token count that the graph was captured with.
    """
    mode = fake_mode(graph.graph)
    shape = [_size(graph, dim) if isinstance(dim, str) else dim for dim in dims]
    with mode:
        value = torch.empty(shape, dtype=dtype)
    if not isinstance(value, FakeTensor):
        raise PassError(f"the fake value of {name} is a {type(value).__name__}")
    return value


def token_count(graph: ModelGraph) -> SymInt:
    """The symbolic size T of the token axis."""
    size: Any = graph.inputs()[0].meta["val"].shape[-1]
    if not isinstance(size, SymInt):
        raise PassError(f"the token axis of {graph.inputs()[0].name} has the fixed size {size}")
    return size


def _size(graph: ModelGraph, dim: str) -> SymInt | int:
    name, plus, offset = dim.partition("+")
    size = token_count(graph) if name == "T" else _symbol(fake_mode(graph.graph).shape_env, name)
    return size + int(offset) if plus else size


def _symbol(shape_env: ShapeEnv | None, name: str) -> SymInt:
    if shape_env is None:
        raise PassError("the graph has no symbolic shapes")
    source = ConstantSource(f"llmc_{name}")
    # The shape environment is the one place that lives as long as the graph's fake values and is shared by its copies.
    known = shape_env.source_to_var.get(source.name)
    symbol = known if known is not None else shape_env.create_symbol(_HINT, source, DimDynamic.DYNAMIC)
    size = shape_env.create_symintnode(symbol, hint=_HINT, source=source)
    if not isinstance(size, SymInt):
        raise PassError(f"size {name} was specialised to {size}")
    return size
