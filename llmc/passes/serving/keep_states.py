"""Keep the states of recurrent layers in slots, one per request, so that a step may contain parts of many requests.

    causal_conv(x, weight, bias)  ->  causal_conv_with_state(x, weight, bias, state_i, query_starts, context_lens,
                                                             state_slots)
and selective_scan, linear_attention and linear_recurrence likewise: the same arguments, then the state and which
requests continue from it. The first rewrite declares state_slots. Must have: operands of exactly the step's tokens, and
no draft. Every such op must be rewritten, or the build fails, unless allow_fallback names states: such a graph is right
for one whole sequence a step only.
Numerics: exact, since both forms take tokens one by one, in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph, StateSpec
from llmc.graph.refusal import Refusal
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import add_step_input, step_input
from llmc.options import BuildOptions
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size
from llmc.program import STATE_SLOTS

CONTRACT = "states"
_llmc = torch.ops.llmc
# The shape of a call's state, by its argument names.
_SHAPES: dict[Any, tuple[Any, Callable[[dict[str, Any]], tuple[int, ...]]]] = {
    _llmc.causal_conv.default: (
        _llmc.causal_conv_with_state.default,
        lambda a: (a["weight"].shape[0] - 1, a["weight"].shape[1]),
    ),
    _llmc.selective_scan.default: (_llmc.selective_scan_with_state.default, lambda a: tuple(a["A"].shape)),
    _llmc.linear_attention.default: (
        _llmc.linear_attention_with_state.default,
        lambda a: (a["v"].shape[1], a["k"].shape[2], a["v"].shape[2]),
    ),
    _llmc.linear_recurrence.default: (
        _llmc.linear_recurrence_with_state.default,
        lambda a: tuple(a["x"].shape[1:]),
    ),
}
_OF_THE_STEP = ("query_starts", "context_lens", STATE_SLOTS)


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Declare the slots, then give every op its state, in order."""
    nodes = [node for node in graph.graph.nodes if node.target in _SHAPES]
    refused = [refusal for node in nodes if (refusal := _refusal(graph, node)) is not None]
    for refusal in refused:
        log.refuse(refusal)
    if refused and CONTRACT not in options.allow_fallback:
        raise PassError(
            f"{len(refused)} of {len(nodes)} states cannot be kept: {refused[0].reason}",
            at=", ".join(r.node.name for r in refused),
            fix="build without speculation"
            if _cannot_hold(graph)
            else f"change the model, or build with allow_fallback=('{CONTRACT}',) to run one sequence at a time",
        )
    kept = [node for node in nodes if node not in {refusal.node for refusal in refused}]
    if kept and step_input(graph, STATE_SLOTS) is None:
        log.step("declare the slots of states", kept[0])
        add_step_input(graph, STATE_SLOTS, ("R",), torch.int32)
    for node in kept:
        log.step(f"keep the state of {node.name}", node)
        _keep(graph, node)


keep_states = GraphPass(
    "keep_states", run, Numerics.EXACT, Stage.SERVING, unproved="it adds inputs, among them the states"
)


def _cannot_hold(graph: ModelGraph) -> str | None:
    """Return why no state of the graph can be kept, if that is so."""
    if graph.speculative is not None or graph.medusa is not None or graph.draft is not None:
        return "a rejected draft cannot be removed from a state"
    return None


def _refusal(graph: ModelGraph, node: fx.Node) -> Refusal | None:
    reason = _cannot_hold(graph)
    if reason is not None:
        return Refusal(reason, node)
    first = next(iter(call_arguments(node).values()))
    tokens = graph.inputs()[0].meta["val"].shape[-1]
    if not same_size(first.meta["val"].shape[0], tokens):
        return Refusal(f"{first.name} is {render_type(first)}, not one row for each of the step's tokens", node)
    return None


def _keep(graph: ModelGraph, node: fx.Node) -> None:
    arguments = call_arguments(node)
    target, shape = _SHAPES[node.target]
    values = {name: a.meta["val"] for name, a in arguments.items() if isinstance(a, fx.Node)}
    spec = StateSpec(len(graph.states), shape(values))
    state = add_step_input(graph, f"state_{spec.index}", ("S", *spec.shape), torch.float32)
    graph.states = (*graph.states, spec)
    of_the_step = [step_input(graph, name) for name in _OF_THE_STEP]
    substitute(graph.graph, node, Call(target, (*arguments.values(), state, *of_the_step)))
