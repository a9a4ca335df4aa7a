"""The matcher: does a pattern end at this node, what do its wildcards bind, and if it nearly does, what is in the way.

Works backwards from the root, with backtracking over the two orders of commutative ops and over casts that may be
absent. A near-miss is a failed candidate that matched more than half of the pattern's ops, and at least two: enough to
assume that the model's code means this operation, and not so few that every `add` reports. A candidate that matches but
is refused (an extra user, the precondition) is always reported.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal, Refused
from llmc.passes.pattern import CAST, COMMUTATIVE, Pattern, Weight, either, trace_pattern
from llmc.passes.shapes import dim_count, tensor_of
from llmc.passes.uses import DATA_MOVEMENT, call_of, is_weight, used_only_by

# A pattern may hold in several ways at one place, which are tried until one is not refused.
_MAX_WAYS = 16


@dataclass(frozen=True)
class Match:
    """A place where a pattern holds.

    Attributes:
        root: The node that the pattern returns.
        bound: The node or constant of each wildcard.
        nodes: The ops between the wildcards and the outputs, the root first.
        outputs: The nodes that the pattern returns, the root first.
        graph: The graph in which it was found.
    """

    root: fx.Node
    bound: dict[str, Any]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    graph: ModelGraph

    @property
    def place(self) -> fx.Node:
        """The node before which the replacement is inserted: the root, or the first of several outputs."""
        return min(self.outputs)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the fake value of the node that is bound to a wildcard, which has its shape and dtype.

        Args:
            name: The wildcard.

        Raises:
            PassError: If the wildcard is not bound to a tensor.
        """
        value = tensor_of(self.bound[name])
        if value is None:
            raise PassError(f"wildcard {name!r} is bound to {self.bound[name]!r}, not to a tensor", at=self.root.name)
        return value


def find_match(
    patterns: Sequence[Callable[..., Any]],
    root: fx.Node,
    graph: ModelGraph,
    precondition: Callable[[Match], Refusal | None] | None = None,
    shares_interior: bool = False,
    applies: Callable[[Match], bool] | None = None,
) -> Match | Refusal | None:
    """The first way in which a pattern holds at root and is not refused; else the Refusal that came closest; else None.

    precondition, shares_interior, applies: as in Rewrite.
    """
    refusal: Refusal | None = None
    closest = 0.0
    for function in patterns:
        pattern = trace_pattern(function)
        if root.target not in pattern.targets:
            continue
        attempt = _Attempt(pattern, root, graph)
        for match in attempt.matches():
            if applies is not None and not applies(match):
                continue
            problem = _problem(match, precondition, shares_interior)
            if problem is None:
                return match
            if closest < math.inf:
                refusal, closest = problem, math.inf
        share = attempt.reached / pattern.size
        if attempt.failure is not None and attempt.reached >= 2 and share > max(0.5, closest):
            refusal, closest = attempt.failure, share
    return refusal


def _problem(
    match: Match, precondition: Callable[[Match], Refusal | None] | None, shares_interior: bool
) -> Refusal | None:
    inside = frozenset(match.nodes)
    try:
        for node in () if shares_interior else match.nodes:
            if node not in match.outputs and node.target not in DATA_MOVEMENT:
                used_only_by(node, inside)
        for node in match.bound.values() if len(match.outputs) > 1 else ():
            if isinstance(node, fx.Node) and not node < match.place:
                reason = f"{node.name} is computed after {match.place.name}, before which the fused op would stand"
                raise Refused(reason, match.root)
        return precondition(match) if precondition is not None else None
    except Refused as refused:
        return refused.refusal


@dataclass(frozen=True)
class _State:
    """The state of a match. nodes: what the pattern's ops stand for. chosen: what its `either` stand for."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    chosen: dict[fx.Node, Any] = field(default_factory=dict)

    def bind(self, name: str, value: Any) -> "_State":
        return replace(self, bound={**self.bound, name: value})

    def place(self, pattern: fx.Node, node: fx.Node) -> "_State":
        return replace(self, nodes={**self.nodes, pattern: node})


# A pattern's value, the graph's, and for an argument the call it belongs to with the argument's name.
_Call = tuple[fx.Node, str] | None
_Goal = tuple[Any, Any, _Call]
_Found = Iterator[_State]


class _Attempt:
    """One pattern at one candidate: the search, and the failure furthest from the root."""

    def __init__(self, pattern: Pattern, root: fx.Node, graph: ModelGraph) -> None:
        self._pattern, self._root, self._graph = pattern, root, graph
        self.reached = 0
        self.failure: Refusal | None = None

    def matches(self) -> Iterator[Match]:
        """The ways in which the pattern holds, without repetition."""
        root, *others = self._pattern.outputs
        goals: list[_Goal] = [(root, self._root, None), *((other, _BY_ITS_INPUTS, None) for other in others)]
        seen: list[Match] = []
        for state in islice(self._solve(tuple(goals), _State()), _MAX_WAYS):
            outputs = tuple(state.chosen.get(output) or state.nodes[output] for output in self._pattern.outputs)
            match = Match(self._root, state.bound, tuple(dict.fromkeys(state.nodes.values())), outputs, self._graph)
            # The replacement reads the values of wildcards, so they cannot be among the replaced nodes.
            if match not in seen and not any(value in match.nodes for value in state.bound.values()):
                seen.append(match)
                yield match

    def _solve(self, goals: tuple[_Goal, ...], state: _State) -> _Found:
        if not goals:
            yield state
            return
        (pattern, value, call), rest = goals[0], goals[1:]
        if isinstance(pattern, fx.Node):
            if pattern.op == "placeholder":
                yield from self._wildcard(str(pattern.target), value, call, rest, state)
            elif value is _BY_ITS_INPUTS:
                yield from self._output(pattern, rest, state)
            elif pattern.target is either:
                yield from self._either(pattern, value, call, rest, state)
            else:
                yield from self._op(pattern, value, call, rest, state)
        elif isinstance(pattern, list | tuple):
            if not isinstance(value, list | tuple) or len(value) != len(pattern):
                self._fail(state, call, repr(value), f"{len(pattern)} elements")
            else:
                goal = ((p, v, call) for p, v in zip(pattern, value, strict=True))
                yield from self._solve((*goal, *rest), state)
        elif not _same_constant(pattern, value, call):
            self._fail(state, call, repr(value), repr(pattern))
        else:
            yield from self._solve(rest, state)

    def _wildcard(self, name: str, value: Any, call: _Call, rest: tuple[_Goal, ...], state: _State) -> _Found:
        kind = self._pattern.kinds.get(name)
        if name in state.bound:
            if _same_constant(state.bound[name], value, call):
                yield from self._solve(rest, state)
            else:
                self._fail(state, call, repr(value), f"{state.bound[name]!r}, the same {name!r} as before")
        elif kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._fail(state, call, repr(value), "a number")
        elif kind is Weight and not (value is None or is_weight(value, self._graph)):
            self._fail(state, call, repr(value), "a weight")
        else:
            yield from self._solve(rest, state.bind(name, value))

    def _either(self, pattern: fx.Node, value: Any, call: _Call, rest: tuple[_Goal, ...], state: _State) -> _Found:
        if pattern in state.chosen:
            if state.chosen[pattern] is value:
                yield from self._solve(rest, state)
            else:
                self._fail(state, call, repr(value), f"{state.chosen[pattern]!r} again")
            return
        chosen = replace(state, chosen={**state.chosen, pattern: value})
        for alternative in pattern.args:
            yield from self._solve(((alternative, value, call), *rest), chosen)

    def _output(self, pattern: fx.Node, rest: tuple[_Goal, ...], state: _State) -> _Found:
        """Match one of several outputs: bound already, within the nodes of the root, or found by its inputs."""
        if pattern in state.nodes or pattern in state.chosen:
            yield from self._solve(rest, state)
            return
        for operand in pattern.all_input_nodes:
            source = state.bound.get(str(operand.target)) if operand.op == "placeholder" else state.nodes.get(operand)
            if isinstance(source, fx.Node):
                for user in source.users:
                    if user.target is pattern.target and user not in state.nodes.values():
                        yield from self._op(pattern, user, None, rest, state)
                return
        raise TypeError(f"output {pattern.name} of pattern {self._pattern.name} reads nothing that the root is made of")

    def _op(self, pattern: fx.Node, value: Any, call: _Call, rest: tuple[_Goal, ...], state: _State) -> _Found:
        if pattern in state.nodes:
            if state.nodes[pattern] is value:
                yield from self._solve(rest, state)
            else:
                self._fail(state, call, repr(value), f"{state.nodes[pattern]!r} again")
            return
        holds = False
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target is pattern.target:
            placed = state.place(pattern, value)
            for order in _argument_goals(pattern, value):
                for solution in self._solve((*order, *rest), placed):
                    holds = True
                    yield solution
        elif pattern.target is not CAST:
            self._fail(state, call, call_of(value), f"a call of {pattern.target}")
        if pattern.target is CAST and isinstance(value, fx.Node) and not holds:
            yield from self._absent_cast(pattern, value, call, rest, state)

    def _absent_cast(
        self, pattern: fx.Node, value: fx.Node, call: _Call, rest: tuple[_Goal, ...], state: _State
    ) -> _Found:
        wanted, tensor = pattern.kwargs.get("dtype"), value.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            self._fail(state, call, call_of(value), "a tensor")
        elif isinstance(wanted, fx.Node):
            yield from self._solve(((wanted, tensor.dtype, call), (pattern.args[0], value, call), *rest), state)
        elif wanted is not tensor.dtype:
            self._fail(state, call, f"dtype {tensor.dtype}", str(wanted), verb="has")
        else:
            yield from self._solve(((pattern.args[0], value, call), *rest), state)

    def _fail(self, state: _State, call: _Call, actual: str, expected: str, verb: str = "is") -> None:
        reached = sum(p.target is not CAST for p in state.nodes)
        if reached > self.reached:
            node, name = call if call is not None else (self._root, "root")
            self.reached = reached
            reason = f"argument {name!r} of {node.target} {verb} {actual}, expected {expected}"
            self.failure = Refusal(reason, node, f"{name}: {expected}", f"{name}: {actual}")


# The value of an output that must still be found.
_BY_ITS_INPUTS = object()


def _argument_goals(pattern: fx.Node, node: fx.Node) -> list[tuple[_Goal, ...]]:
    """The goals for a call's arguments, ops before wildcards so that the search fails early; twice if it commutes."""
    wanted, seen = call_arguments(pattern), call_arguments(node)
    goals: list[_Goal] = [(p, seen[name], (node, name)) for name, p in wanted.items() if name in seen]
    orders = [goals]
    if node.target in COMMUTATIVE:
        (first, x, x_at), (second, y, y_at), *others = goals
        orders.append([(first, y, y_at), (second, x, x_at), *others])
    return [tuple(sorted(order, key=lambda g: not _is_op(g[0]))) for order in orders]


def _is_op(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_op(v) for v in value)
    return isinstance(value, fx.Node) and value.op == "call_function"


def _same_constant(wanted: Any, value: Any, call: tuple[fx.Node, str] | None) -> bool:
    if isinstance(wanted, fx.Node) or isinstance(value, fx.Node):
        return wanted is value
    if type(wanted) is bool or type(value) is bool:
        return wanted is value
    if wanted == value:
        return True
    is_dim = call is not None and call[1] in ("dim", "dim0", "dim1")
    if is_dim and isinstance(wanted, int) and isinstance(value, int):
        assert call is not None
        return (wanted - value) % dim_count(call[0]) == 0
    return False
