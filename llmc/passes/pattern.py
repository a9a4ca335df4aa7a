"""Patterns as small graphs: a plain function traced once, its parameters the wildcards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

COMMUTATIVE = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor})
CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Pattern:
    """root: the traced node that anchors the match. size: how many ops it has, casts not counted, since they may be
    absent from what it matches."""

    name: str
    root: fx.Node
    size: int


@functools.cache
def trace_pattern(function: Callable[..., Any]) -> Pattern:
    """The pattern that a function draws by calling ops on its parameters. It must return one op's result."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)  # fx.Tracer patches and searches modules first, which takes 20 times as long
    result = function(**{name: fx.Proxy(graph.placeholder(name), tracer) for name in parameters(function)})
    root = result.node if isinstance(result, fx.Proxy) else result
    if not isinstance(root, fx.Node) or root.op != "call_function":
        raise TypeError(f"pattern {function.__name__} must return the result of one op, not {root!r}")
    size = sum(n.op == "call_function" and n.target is not CAST for n in graph.nodes)
    return Pattern(function.__name__, root, size)


@functools.cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a pattern's wildcards, or of what a replacement takes."""
    return tuple(inspect.signature(function).parameters)
