"""The forms of a pattern: one graph for each choice among its alternatives, and what its wildcards may be there."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.op_record import OpCall, record_of
from llmc.passes.pattern import Pattern, Weight, either

# Tried for a wildcard in this order; small, unequal where they can be, and no number that is special.
_SHAPES = ((2, 4), (4,), (3, 4), (2,), (3,), (2, 3), (2, 2, 4), (2, 2), (4, 4), ())
_NUMBERS = (0.625, 2)
_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "float": _NUMBERS,
    "number": _NUMBERS,
    "int": (0, 1, 2, 4, -1),
    "bool": (False, True),
    "str": ("none", "tanh", "silu", "gelu"),
    "ScalarType": (torch.float32,),
    "List[int]": ([4], [-1], [2], [2, 2], [2, 4], [0, 1]),
}
# How many calls are tried before the search is given up.
_TRIES = 3000


class Form:
    """One form of a pattern. outputs: its ops, as the traced pattern has them."""

    def __init__(self, pattern: Pattern, chosen: Mapping[fx.Node, Any]) -> None:
        self._chosen, self._kinds = chosen, pattern.kinds
        self.outputs = tuple(self._resolved(each) for each in pattern.outputs)
        self.calls: tuple[fx.Node, ...] = tuple(self._inputs_first())

    def wildcards(self) -> tuple[str, ...]:
        """Those that this form has."""
        found = (n for call in self.calls for n in self._inputs(call) if n.op == "placeholder")
        return tuple(dict.fromkeys(str(n.target) for n in found))

    def body(self, **values: Any) -> Any:
        """The form drawn on these values, or computed of them."""
        made: dict[fx.Node, Any] = {}
        for call in self.calls:
            made[call] = self._call(call, made, values)
        results = tuple(made[each] for each in self.outputs)
        return results if len(results) > 1 else results[0]

    def bindings(self, known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Values of the wildcards for which every op runs, tensors as shapes."""
        tries = itertools.count()

        def bind(index: int, made: dict[fx.Node, Any], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
            if index == len(self.calls):
                yield values
                return
            call = self.calls[index]
            free = [n for n in dict.fromkeys(self._inputs(call)) if n.op == "placeholder" and n.target not in values]
            for chosen in itertools.product(*(self._domain(n, call) for n in free)):
                if next(tries) > _TRIES:
                    return
                bound = {**values, **{str(n.target): value for n, value in zip(free, chosen, strict=True)}}
                try:
                    tensors = {name: _as_tensor(value) for name, value in bound.items()}
                    result = self._call(call, made, tensors)
                    fits = self._fits(call, made, tensors, result)
                except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                    continue
                if fits:
                    yield from bind(index + 1, {**made, call: result}, bound)

        names = self.wildcards()
        yield from bind(0, {}, {name: value for name, value in known.items() if name in names})

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
        given = fx.map_arg(call_arguments(call), lambda node: self._value(node, made, values))
        return record.check(OpCall(given, result, {})) is None

    def _domain(self, wildcard: fx.Node, call: fx.Node) -> Sequence[Any]:
        kind = self._kinds.get(str(wildcard.target))
        if kind is float:
            return _NUMBERS
        schema = getattr(call.target, "_schema", None)
        if schema is None:  # operator.getitem
            return _BY_TYPE["int"]
        names = [n for n, a in call_arguments(call).items() if wildcard in map(self._resolved, _nodes(a))]
        wanted = str(next(a.real_type for a in schema.arguments if a.name == names[0]))
        optional = wanted.removeprefix("Optional[").removesuffix("]") if wanted.startswith("Optional[") else wanted
        if "Tensor" not in optional:
            return _BY_TYPE.get(optional, ())
        # torch takes a number in the place of an operand, but of the first.
        numbers = () if kind is Weight or schema.arguments[0].name == names[0] else _NUMBERS
        return (*_SHAPES, *numbers, *((None,) if optional is not wanted else ()))

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
            for each in self._inputs(node):
                yield from visit(each)
            yield node

        for output in self.outputs:
            yield from visit(output)


def forms(pattern: Pattern) -> list[Form]:
    """Every form, without repetition."""
    graph = pattern.outputs[0].graph
    choices = [n for n in graph.nodes if n.target is either]
    found: dict[tuple[fx.Node, ...], Form] = {}
    for chosen in itertools.product(*(n.args for n in choices)):
        form = Form(pattern, dict(zip(choices, chosen, strict=True)))
        key = (*form.calls, *(n for call in form.calls for n in form._inputs(call)))
        found.setdefault(key, form)
    return list(found.values())


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def _as_tensor(value: Any) -> Any:
    # Without data: wrong shapes given to some of torch's kernels end the process.
    return torch.empty(value, device="meta") if isinstance(value, tuple) else value
