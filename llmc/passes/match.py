"""The matcher: does a pattern end at this node, what do its wildcards bind, and if it nearly does, what is in the way.

Works backwards from the root, with backtracking over the two orders of commutative ops and over casts that may be
absent. A near-miss is a failed candidate of which more than half of the pattern's ops, and at least two, did match:
enough to say that the user's code meant this operation, not so little that every `add` reports. A candidate that
matches but is refused (an extra user, the precondition) is always reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.refusal import Refusal
from llmc.passes.pattern import CAST, COMMUTATIVE, trace_pattern

aten = torch.ops.aten

DATA_MOVEMENT = frozenset(
    {
        CAST,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class Match:
    """A place where a pattern holds. bound: what each wildcard stands for, a node or a constant.

    nodes: the ops between the wildcards and the root, which comes first.
    """

    root: fx.Node
    bound: dict[str, Any]
    nodes: tuple[fx.Node, ...]

    def tensor(self, name: str) -> torch.Tensor:
        """The fake value of the node bound to a wildcard; PassError if it is bound to something else."""
        node = self.bound[name]
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            raise PassError(f"wildcard {name!r} is bound to {node!r}, not to a tensor", at=self.root.name)
        return value


def find_match(
    patterns: Sequence[Callable[..., Any]],
    root: fx.Node,
    precondition: Callable[[Match], Refusal | None] | None,
    shares_interior: bool,
    applies: Callable[[Match], bool] | None = None,
) -> Match | Refusal | None:
    """The first pattern that holds at root and is not refused; else the Refusal that came closest; else None.

    applies: as in Rewrite.
    """
    refusal: Refusal | None = None
    closest = 0.0
    for function in patterns:
        pattern = trace_pattern(function)
        if pattern.root.target is not root.target:
            continue
        attempt = _Attempt(root)
        state = attempt.solve(((pattern.root, root, None),), _State())
        if state is None:
            share = attempt.reached / pattern.size
            if attempt.failure is not None and attempt.reached >= 2 and share > max(0.5, closest):
                refusal, closest = attempt.failure, share
            continue
        match = Match(root, state.bound, tuple(dict.fromkeys(state.nodes.values())))
        if applies is not None and not applies(match):
            continue
        problem = (None if shares_interior else _extra_user(match)) or (precondition(match) if precondition else None)
        if problem is None:
            return match
        if closest < 1:
            refusal, closest = problem, 1.0
    return refusal


@dataclass(frozen=True)
class _State:
    bound: dict[str, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def bind(self, name: str, value: Any) -> _State:
        return _State({**self.bound, name: value}, self.nodes)

    def place(self, pattern: fx.Node, node: fx.Node) -> _State:
        return _State(self.bound, {**self.nodes, pattern: node})


# A pattern's value, the graph's, and for an argument the call it belongs to with the argument's name.
_Goal = tuple[Any, Any, tuple[fx.Node, str] | None]


class _Attempt:
    """One pattern at one candidate: the search, and the failure furthest from the root."""

    def __init__(self, root: fx.Node) -> None:
        self._root = root
        self.reached = 0
        self.failure: Refusal | None = None

    def solve(self, goals: tuple[_Goal, ...], state: _State) -> _State | None:
        if not goals:
            return state
        (pattern, value, call), rest = goals[0], goals[1:]
        if isinstance(pattern, fx.Node):
            if pattern.op == "placeholder":
                return self._wildcard(str(pattern.target), value, call, rest, state)
            return self._op(pattern, value, call, rest, state)
        if isinstance(pattern, list | tuple):
            if not isinstance(value, list | tuple) or len(value) != len(pattern):
                return self._fail(state, call, repr(value), f"{len(pattern)} elements")
            return self.solve((*((p, v, call) for p, v in zip(pattern, value, strict=True)), *rest), state)
        if not _same_constant(pattern, value, call):
            return self._fail(state, call, repr(value), repr(pattern))
        return self.solve(rest, state)

    def _wildcard(
        self, name: str, value: Any, call: tuple[fx.Node, str] | None, rest: tuple[_Goal, ...], state: _State
    ) -> _State | None:
        if name not in state.bound:
            return self.solve(rest, state.bind(name, value))
        if not _same_constant(state.bound[name], value, call):
            return self._fail(state, call, repr(value), f"{state.bound[name]!r}, the same {name!r} as before")
        return self.solve(rest, state)

    def _op(
        self,
        pattern: fx.Node,
        value: Any,
        call: tuple[fx.Node, str] | None,
        rest: tuple[_Goal, ...],
        state: _State,
    ) -> _State | None:
        if pattern in state.nodes:
            if state.nodes[pattern] is value:
                return self.solve(rest, state)
            return self._fail(state, call, repr(value), f"{state.nodes[pattern]!r} again")
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target is pattern.target:
            placed = state.place(pattern, value)
            for order in _argument_goals(pattern, value):
                found = self.solve((*order, *rest), placed)
                if found is not None:
                    return found
        elif pattern.target is not CAST:
            return self._fail(state, call, _call_of(value), f"a call of {pattern.target}")
        if pattern.target is CAST and isinstance(value, fx.Node):
            return self._absent_cast(pattern, value, call, rest, state)
        return None

    def _absent_cast(
        self, pattern: fx.Node, value: fx.Node, call: tuple[fx.Node, str] | None, rest: tuple[_Goal, ...], state: _State
    ) -> _State | None:
        wanted, tensor = pattern.kwargs.get("dtype"), value.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return self._fail(state, call, _call_of(value), "a tensor")
        if isinstance(wanted, fx.Node):
            return self.solve(((wanted, tensor.dtype, call), (pattern.args[0], value, call), *rest), state)
        if wanted is not tensor.dtype:
            return self._fail(state, call, f"dtype {tensor.dtype}", str(wanted), verb="has")
        return self.solve(((pattern.args[0], value, call), *rest), state)

    def _fail(
        self, state: _State, call: tuple[fx.Node, str] | None, found: str, expected: str, verb: str = "is"
    ) -> _State | None:
        reached = sum(p.target is not CAST for p in state.nodes)
        if reached > self.reached:
            node, name = call if call is not None else (self._root, "root")
            self.reached = reached
            reason = f"argument {name!r} of {node.target} {verb} {found}, expected {expected}"
            self.failure = Refusal(reason, node, f"{name}: {expected}", f"{name}: {found}")
        return None


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


def dim_count(call: fx.Node) -> int:
    """How many dims a `dim` argument of this call chooses from: the rank of what comes out of unsqueeze and stack,
    else the rank of the first tensor that goes in."""
    if call.target in (aten.unsqueeze.default, aten.stack.default):
        return int(call.meta["val"].dim())
    first = call.all_input_nodes[0].meta["val"]
    return max(int(first.dim()), 1)


def _extra_user(match: Match) -> Refusal | None:
    inside = set(match.nodes)
    for node in match.nodes[1:]:
        extra = next((user for user in node.users if user not in inside), None)
        if extra is not None and node.target not in DATA_MOVEMENT:
            reason = f"{node.name} is also used by {extra.name} ({_call_of(extra)})"
            inner = ", ".join(u.name for u in node.users if u in inside)
            return Refusal(reason, node, f"no user but {inner}", f"the user {extra.name}", (extra,))
    return None


def _call_of(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return repr(value)
    if isinstance(value.target, OpOverload):
        return str(value.target)
    return f"{value.op} {value.name}"
