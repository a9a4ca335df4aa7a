"""Patterns as small graphs: a plain function traced once, its parameters the wildcards."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

COMMUTATIVE = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor})
CAST = torch.ops.aten._to_copy.default


class Weight:
    """The annotation of a wildcard that binds what is known when the engine is built: a weight, or what is computed
    only from weights, such as the values of codes. Also None, for an argument that is not given."""


def either(*alternatives: Any) -> Any:
    """Inside a pattern, return a value that may have any of several forms.

    Args:
        *alternatives: The forms, tried in order. At least one must be an op's result. Wildcards of forms that do not
            hold stay unbound.

    Returns:
        The value in whichever form holds, for further ops of the pattern.
    """
    tracer = next(a.tracer for a in alternatives if isinstance(a, fx.Proxy))
    return tracer.create_proxy("call_function", either, alternatives, {})


@dataclass(frozen=True)
class Pattern:
    """A traced pattern. outputs: the traced nodes that it returns; the first is the root, which anchors the match.
    targets: the ops that the root may call. size: minimum number of ops, without casts, which may be absent from a
    match. kinds: wildcards that bind one kind of value only: Weight, or float for numbers."""

    function: Callable[..., Any]
    outputs: tuple[fx.Node, ...]
    targets: frozenset[Any]
    size: int
    kinds: dict[str, type]

    @property
    def name(self) -> str:
        """The name of the function that was traced."""
        return self.function.__name__


@functools.cache
def trace_pattern(function: Callable[..., Any]) -> Pattern:
    """The pattern that a function draws by calling ops on its parameters. It must return an op's result, or several."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)  # fx.Tracer patches and searches modules first, which takes 20 times as long
    result = function(**{name: fx.Proxy(graph.placeholder(name), tracer) for name in parameters(function)})
    several = result if isinstance(result, tuple) else (result,)
    outputs = tuple(r.node if isinstance(r, fx.Proxy) else r for r in several)
    for output in outputs:
        if not isinstance(output, fx.Node) or output.op != "call_function":
            raise TypeError(f"pattern {function.__name__} must return results of ops, not {output!r}")
    targets = frozenset(node.target for node in _alternatives(outputs[0]))
    return Pattern(function, outputs, targets, _size(outputs), _kinds(function))


@functools.cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a pattern's wildcards, or of a replacement's parameters."""
    return tuple(inspect.signature(function).parameters)


def _alternatives(node: fx.Node) -> Iterator[fx.Node]:
    """A node, or what `either` chooses from."""
    if node.target is not either:
        yield node
        return
    for operand in node.all_input_nodes:
        yield from _alternatives(operand)


def _size(outputs: tuple[fx.Node, ...]) -> int:
    """Ops in the smallest form of the pattern."""

    def within(node: fx.Node) -> frozenset[fx.Node]:
        if node.op == "placeholder":
            return frozenset()
        if node.target is either:
            return min((within(a) if isinstance(a, fx.Node) else frozenset() for a in node.args), key=len)
        own = frozenset({node} if node.target is not CAST else ())
        return own.union(*(within(n) for n in node.all_input_nodes))

    return len(frozenset().union(*(within(output) for output in outputs)))


def _kinds(function: Callable[..., Any]) -> dict[str, type]:
    annotations = inspect.get_annotations(function, eval_str=True)
    kinds = {Weight: Weight, Weight | None: Weight, float: float}
    return {name: kinds[kind] for name, kind in annotations.items() if name != "return" and kind in kinds}
