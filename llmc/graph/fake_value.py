"""Fake values (shape and dtype, no data) of new nodes, from the fake values of their inputs."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx.node import map_arg

from llmc.errors import PassError
from llmc.graph.dtype_names import torch_name

# Ops with these tags make a new symbol at each call.
_MAKES_SYMBOLS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class FakeValues:
    """Fake values of a graph and its copies; calls of an op on inputs of the same shapes, strides and dtypes
    share one.

    Layers repeat the same calls, and so do passes that run over a graph again, as when a wrong one is searched for, and
    a fake tensor with a symbolic size takes long to make.
    """

    def __init__(self) -> None:
        # That of the first call's graph.
        self._mode: FakeTensorMode | None = None
        self._known: dict[Hashable, Any] = {}
        # By identity, with the tensor so that it lives on and the identity stays its own.
        self._described: dict[int, tuple[Tensor, Hashable]] = {}

    def of(self, node: fx.Node) -> Any:
        """The fake result of a call_function node; arguments and errors as `fake_value`."""
        target = node.target
        if self._mode is None:
            self._mode = fake_mode(node.graph)
        if not isinstance(target, OpOverload) or any(tag in target.tags for tag in _MAKES_SYMBOLS):
            return fake_value(node, self._mode)
        key = (target, self._key(node.args), self._key(node.kwargs))
        if key not in self._known:
            self._known[key] = fake_value(node, self._mode)
        return self._known[key]

    def _key(self, value: Any) -> Hashable:
        """Return a key that is equal for arguments that an op can tell apart only by their data; 1, 1.0 and True
        differ."""
        if isinstance(value, fx.Node):
            return self._key(_value(value))
        if isinstance(value, Tensor):
            if id(value) not in self._described:
                self._described[id(value)] = (value, self._tensor_key(value))
            return self._described[id(value)][1]
        if isinstance(value, list | tuple):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        return _size_key(value)

    def _tensor_key(self, value: Tensor) -> Hashable:
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return (value.dtype, value.device, tuple(map(_size_key, sizes)))


def _size_key(value: Any) -> Hashable:
    return (SymInt, value.node.expr) if isinstance(value, SymInt) else (type(value), value)


def fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """The result of a call_function node, as a FakeTensor, a tuple of them, a SymInt or None.

    Raises PassError, naming the node and what it is called with, where the op does not accept its inputs.
    """
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    if not callable(node.target):
        raise PassError(f"{node.op} {node.target} is not a call", at=node.name)
    try:
        # The mode's own cache takes as long as the op itself to make an entry, and FakeValues asks for none twice.
        with disable_fake_tensor_cache(mode), mode, enable_python_dispatcher():
            return node.target(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shown = ", ".join(describe(a) for a in (*args, *kwargs.values()))
        raise PassError(
            f"{node.target} does not accept ({shown}): {error}",
            at=node.name,
            fix="a pass that gives a node other inputs keeps their shapes and dtypes, or makes a new node",
        ) from error


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's fake values belong to."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise PassError("the graph has no fake values", at=str(graph))


def describe(value: Any) -> str:
    """A value for a message: a tensor as float32[T, 64], anything else as it prints."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, torch.Tensor):
        return f"{torch_name(value.dtype)}{[*map(str, value.shape)]}".replace("'", "")
    return repr(value)


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise PassError("node has no fake value", at=node.name, fix="propagate the graph first")
    return node.meta["val"]
