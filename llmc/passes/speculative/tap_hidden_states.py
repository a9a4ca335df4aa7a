"""Return hidden states in addition to the logits, for a drafter that reads them.

    logits[T, V]  ->  logits[T, V], hidden[T, n · C] = cat(state before layer i, state before layer j, …)
Must have: one tensor that goes from layer to layer (residual_stream.py), before each of the requested layers. The
number of layers stands for the state after the last one, and None for the input of the output matrix. Anything else
fails the build, because a drafter that reads other states would silently draft badly.
Numerics: exact. Source: Li et al. 2025, "EAGLE-3"; DeepSeek-AI 2024, "DeepSeek-V3 technical report".
"""

from collections.abc import Sequence

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.speculative.residual_stream import attentions, hidden_states, output_reads
from llmc.program import HIDDEN


def tap(graph: ModelGraph, layers: Sequence[int] | None, log: RewriteLog) -> None:
    """Make them the side output `hidden` of a canonical graph; once. Raises PassError."""
    if HIDDEN in graph.side_outputs:
        return
    if layers is None:
        source = output_reads(graph)
        log.step(f"tap the last hidden state, {source.name}", source)
        graph.add_side_output(HIDDEN, source)
        return
    states = [_state(graph, layer, log) for layer in layers]
    log.step(f"tap the hidden states before the layers {', '.join(map(str, layers))}", *states)
    if len(states) == 1:
        graph.add_side_output(HIDDEN, states[0])
        return
    with graph.graph.inserting_before(graph.graph.output_node()):
        graph.add_side_output(HIDDEN, graph.graph.call_function(torch.ops.aten.cat.default, (states, 1)))


def tap_hidden_states(layers: Sequence[int] | None) -> GraphPass:
    """The pass for these layers. For `llmc.passes.extended`: it goes where graphs are canonical."""
    chosen = None if layers is None else tuple(layers)

    def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        tap(graph, chosen, log)

    return GraphPass("tap_hidden_states", run, Numerics.EXACT, after="check_canonical")


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Tap the states that the graph's drafter reads."""
    if graph.speculative is not None:
        width = int(output_reads(graph).meta["val"].shape[1])
        tap(graph, graph.speculative.taps(len(attentions(graph)), width), log)


tap_for_draft = GraphPass("tap_hidden_states", _run, Numerics.EXACT, unproved="it adds a result, the hidden states")


def _state(graph: ModelGraph, layer: int, log: RewriteLog) -> fx.Node:
    states = hidden_states(graph)
    if not 0 <= layer < len(states):
        raise PassError(
            f"there is no hidden state before layer {layer} of {len(states) - 1}",
            at=graph.info.name,
            fix=f"count layers from 0; {len(states) - 1} is the state after the last one",
        )
    state = states[layer]
    if isinstance(state, Refusal):
        log.refuse(state)
        raise PassError(state.reason, at=state.node.name, fix="tap another layer, or build without speculative")
    return state
