"""The forms of a pattern: one graph for each choice among its alternatives, and what its wildcards may be there."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from llmc.debug.prove.domains import INTEGERS, NUMBERS, domain
from llmc.graph.call_arguments import call_arguments
from llmc.graph.op_record import OpCall, record_of
from llmc.passes.pattern import Pattern, Weight, either

_TRIES = 20_000
_RUNS_NOT = object()


class Form:
    """One form of a pattern. outputs: its ops, as the traced pattern has them."""

    def __init__(self, pattern: Pattern, chosen: Mapping[fx.Node, Any]) -> None:
        self._chosen, self._kinds = chosen, pattern.kinds
        self.outputs = tuple(self._resolved(output) for output in pattern.outputs)
        self.calls: tuple[fx.Node, ...] = tuple(self._inputs_first())
        self._results: dict[Hashable, Any] = {}

    def wildcards(self) -> tuple[str, ...]:
        """The wildcards of this form."""
        placeholders = (n for call in self.calls for n in self._inputs(call) if n.op == "placeholder")
        return tuple(dict.fromkeys(str(n.target) for n in placeholders))

    def body(self, **values: Any) -> Any:
        """The form drawn on these values, or computed of them."""
        computed: dict[fx.Node, Any] = {}
        for call in self.calls:
            computed[call] = self._call(call, computed, values)
        results = tuple(computed[output] for output in self.outputs)
        return results if len(results) > 1 else results[0]

    def bindings(self, known: Mapping[str, Any], most_tries: int = _TRIES) -> Iterator[dict[str, Any]]:
        """Yield values of the wildcards for which every op runs. Tensors are given as shapes.

        known: Values that are fixed. most_tries: The number of calls after which the search ends.
        """
        tries = itertools.count()

        def bind(index: int, made: dict[fx.Node, Any], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
            if index == len(self.calls):
                yield values
                return
            call = self.calls[index]
            free = [n for n in dict.fromkeys(self._inputs(call)) if n.op == "placeholder" and n.target not in values]
            for chosen in itertools.product(*(self.domain(str(n.target)) for n in free)):
                if next(tries) >= most_tries:
                    return
                bound = {**values, **{str(n.target): value for n, value in zip(free, chosen, strict=True)}}
                result = self._result(call, made, bound)
                if result is not _RUNS_NOT:
                    yield from bind(index + 1, {**made, call: result}, bound)

        names = self.wildcards()
        yield from bind(0, {}, {name: value for name, value in known.items() if name in names})

    def _result(self, call: fx.Node, made: Mapping[fx.Node, Any], values: Mapping[str, Any]) -> Any:
        """The result of a call on fake tensors, cached by shapes."""
        arguments = fx.map_arg((call.args, call.kwargs), lambda node: self._value(node, made, values))
        key = (call, _key(arguments))
        if key not in self._results:
            try:
                tensors = {name: _as_tensor(value) for name, value in values.items()}
                result = self._call(call, made, tensors)
                self._results[key] = result if self._fits(call, made, tensors, result) else _RUNS_NOT
            except Exception:  # Each fake rejects such arguments with a different exception.
                self._results[key] = _RUNS_NOT
        return self._results[key]

    def _call(self, call: fx.Node, made: Mapping[fx.Node, Any], values: Mapping[str, Any]) -> Any:
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda node: self._value(node, made, values))
        assert callable(call.target)
        return call.target(*args, **kwargs)

    def _value(self, node: fx.Node, made: Mapping[fx.Node, Any], values: Mapping[str, Any]) -> Any:
        resolved = self._resolved(node)
        if not isinstance(resolved, fx.Node):
            return resolved
        return values[str(resolved.target)] if resolved.op == "placeholder" else made[resolved]

    def _fits(self, call: fx.Node, made: Mapping[fx.Node, Any], values: Mapping[str, Any], result: Any) -> bool:
        """Whether an llmc op's own check of shapes, which its fake does not make, lets the call pass."""
        record = record_of(call)
        if record is None or record.check is None:
            return True
        arguments = fx.map_arg(call_arguments(call), lambda node: self._value(node, made, values))
        return record.check(OpCall(arguments, result, {})) is None

    def domain(self, wildcard: str) -> Sequence[Any]:
        """The domain of a wildcard, by the first op that reads it."""
        call = next(c for c in self.calls if any(n.target == wildcard for n in self._inputs(c)))
        kind = self._kinds.get(wildcard)
        if kind is float:
            return NUMBERS
        if getattr(call.target, "_schema", None) is None:  # operator.getitem
            return INTEGERS
        arguments = call_arguments(call).items()
        name = next(n for n, a in arguments if any(self._resolved(v).target == wildcard for v in _nodes(a)))
        return domain(call, name, may_be_number=kind is not Weight)

    def broadcasts(self, wildcard: str) -> bool:
        """Whether it may be a tensor that others are larger than: llmc's ops read none so."""
        return all(record_of(c) is None for c in self.calls if any(n.target == wildcard for n in self._inputs(c)))

    def _inputs(self, call: fx.Node) -> list[fx.Node]:
        resolved = (self._resolved(n) for n in call.all_input_nodes)
        return [n for n in resolved if isinstance(n, fx.Node)]

    def _resolved(self, node: fx.Node) -> Any:
        while isinstance(node, fx.Node) and node.target is either:
            node = self._chosen[node]
        return node

    def _inputs_first(self) -> Iterator[fx.Node]:
        seen: set[fx.Node] = set()

        def visit(node: fx.Node) -> Iterator[fx.Node]:
            if node in seen or node.op == "placeholder":
                return
            seen.add(node)
            for operand in self._inputs(node):
                yield from visit(operand)
            yield node

        for output in self.outputs:
            yield from visit(output)


def forms(pattern: Pattern) -> list[Form]:
    """Return every form, without repetition."""
    graph = pattern.outputs[0].graph
    choices = [n for n in graph.nodes if n.target is either]
    distinct: dict[tuple[fx.Node, ...], Form] = {}
    for chosen in itertools.product(*(n.args for n in choices)):
        form = Form(pattern, dict(zip(choices, chosen, strict=True)))
        key = (*form.calls, *(n for call in form.calls for n in form._inputs(call)))
        distinct.setdefault(key, form)
    return list(distinct.values())


def _nodes(argument: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return nodes


def _key(value: Any) -> Hashable:
    """A key that is equal for values that a call on fake tensors cannot distinguish."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, *value.shape)
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return (type(value), value)


def _as_tensor(value: Any) -> Any:
    # Without data: wrong shapes given to some of torch's kernels end the process.
    return torch.empty(value, device="meta") if isinstance(value, tuple) else value
