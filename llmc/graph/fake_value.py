"""The fake value (shape and dtype, no data) of one new node, from the fake values of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from llmc.errors import PassError


def fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a call_function node returns, as FakeTensor, tuple of them, SymInt or None.

    Raises PassError, naming the node and what it is called with, where the op does not accept its inputs.
    """
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    if not callable(node.target):
        raise PassError(f"{node.op} {node.target} is not a call", at=node.name)
    try:
        with mode, enable_python_dispatcher():
            return node.target(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shown = ", ".join(describe(a) for a in (*args, *kwargs.values()))
        raise PassError(f"{node.target} does not accept ({shown}): {error}", at=node.name) from error


def describe(value: Any) -> str:
    """A value for a message: a tensor as float32[T, 64], anything else as it prints."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*map(str, value.shape)]}".replace("'", "")
    return repr(value)


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise PassError("node has no fake value", at=node.name, fix="propagate the graph first")
    return node.meta["val"]
