"""Whole-graph passes made of rules, each of which matches one node and returns its replacement."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import op_name
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_value, sizes_with_inferred

# Rules shrink a graph or move something one node further, so this bounds the longest chain, not the graph.
_MAX_SWEEPS = 200


@dataclass(frozen=True)
class Call:
    """A call to be made; arguments may be nodes, constants, and calls themselves, also inside lists."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


# None: the rule does not apply. A node or call: what to use instead, of the same shape and dtype. May raise Refused.
Rule = Callable[[fx.Node], fx.Node | Call | None]


def rule_pass(
    name: str,
    rules: Callable[[ModelGraph], Mapping[Any, Rule]],
    numerics: Numerics,
    *examples: Example,
    unproved: str | None = None,
) -> GraphPass:
    """A pass over the captured graph that consists of rules. rules: those of a graph, by the op that they are for."""

    @functools.wraps(rules)  # docs/passes.md describes a pass by the file of its function
    def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        apply_rules(graph, rules(graph), log)

    return GraphPass(name, run, numerics, Stage.CAPTURED, examples=examples, unproved=unproved)


def apply_rules(graph: ModelGraph, rules: Mapping[Any, Rule], log: RewriteLog) -> None:
    """Rewrite every node whose target has a rule, until none applies; each replacement is one step of the log."""
    for _ in range(_MAX_SWEEPS):
        log.drop_refusals()
        if not _sweep(graph.graph, rules, log):
            return
    raise PassError(f"still finds candidates after {_MAX_SWEEPS} sweeps", fix="its rules undo each other")


def _sweep(graph: fx.Graph, rules: Mapping[Any, Rule], log: RewriteLog) -> bool:
    changed = False
    for node in list(graph.nodes):
        rule = rules.get(node.target) if node.op == "call_function" and node.users else None
        if rule is None:
            continue
        with log.refusing():
            replacement = rule(node)
            if replacement is not None:
                name = replacement.name if isinstance(replacement, fx.Node) else op_name(replacement.target)
                log.step(f"{op_name(node.target)} {node.name} → {name}", node)
                substitute(graph, node, replacement)
                changed = True
    return changed


def substitute(graph: fx.Graph, node: fx.Node, value: fx.Node | Call) -> fx.Node:
    """Hand a node's users to a value of the same shape and dtype, made before it; the node, if unused, is erased."""
    with graph.inserting_before(node):
        new: fx.Node = build(graph, value)
    if not same_value(node.meta["val"], new.meta["val"]):
        raise PassError(f"{describe(node.meta['val'])} would become {describe(new.meta['val'])}", at=node.name)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def build(graph: fx.Graph, value: Any) -> Any:
    """Make the calls that a value consists of at the graph's insertion point."""
    if isinstance(value, Call):
        args = tuple(build(graph, a) for a in value.args)
        return graph.call_function(value.target, args, {k: build(graph, a) for k, a in value.kwargs.items()})
    if isinstance(value, list | tuple) and not isinstance(value, fx.Node):
        return [build(graph, v) for v in value]
    return value


def reshaped(x: fx.Node | Call, shape: Sequence[Any]) -> Call | None:
    """x in another shape; None if several of its sizes are symbolic."""
    sizes = sizes_with_inferred(shape)
    return None if sizes is None else Call(torch.ops.aten.reshape.default, (x, sizes))


def permuted(x: fx.Node | Call, order: Sequence[int]) -> fx.Node | Call:
    """x with its axes in another order, by as few transpositions as it takes."""
    current = list(range(len(order)))
    for place, wanted in enumerate(order):
        at = current.index(wanted)
        if at != place:
            x = Call(torch.ops.aten.transpose.int, (x, place, at))
            current[place], current[at] = current[at], current[place]
    return x
