"""Move the draft layers into a second graph, and combine the target's hidden states into their input.

    hidden[T, n · C]  ->  linear(rms_norm(hidden), fc)[T, C], if the drafter reads several states; norms if it has them
The second graph, ModelGraph.draft, goes through the same passes separately, into its own engine within the first. If
several layers each draft from the states of the one before, each is the drafter of its predecessor. Embeddings and
output matrix are the target's if the drafter's checkpoint has none.
Must have: `tap_hidden_states` before it, and a draft that was made for this model.
Numerics: exact.
"""

import torch
from torch import fx

from llmc.errors import PassError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.draft_records import PREFIX, Combination, Target
from llmc.graph.model_graph import AttachedDraft, DraftCheckpoint, ModelGraph
from llmc.graph.weights import Stored, identifier
from llmc.options import BuildOptions
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.speculative.residual_stream import attentions, output_reads
from llmc.program import HIDDEN

_llmc, _aten = torch.ops.llmc, torch.ops.aten


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Attach the drafter to a canonical graph. Raises CheckpointError for a drafter of another model."""
    checkpoint = graph.speculative
    if checkpoint is None or graph.draft is not None:
        return
    target = target_of(graph, options.max_model_len)
    combination = checkpoint.combination(target)
    drafts = checkpoint.graphs(target, graph.info)
    if combination is not None:
        _combine(graph, combination, checkpoint, log)
    log.step(f"attach the layers that {checkpoint.method} drafts with", _source(graph))
    last: AttachedDraft | None = None
    for draft in reversed(drafts):
        draft.graph.draft, last = last, draft
    graph.draft = last


attach_draft = GraphPass("attach_draft", run, Numerics.EXACT, unproved="it makes a second graph, of other weights")


def target_of(graph: ModelGraph, longest: int | None) -> Target:
    """The target that a drafter of the graph's model must fit. longest: requested maximum length; None takes the
    model's own."""
    (head,) = graph.graph.find_nodes(op="call_function", target=_llmc.lm_head.default)
    ids = graph.inputs()[0]
    table = next(
        call_arguments(node)["weight"]
        for node in graph.graph.find_nodes(op="call_function", target=_llmc.embedding.default)
        if call_arguments(node)["ids"] is ids
    )
    return Target(
        name=graph.info.name,
        width=int(output_reads(graph).meta["val"].shape[1]),
        vocab_size=graph.info.vocab_size,
        layers=len(attentions(graph)),
        dtype=graph.info.dtype,
        embedding=graph.weights[table.name],
        output=graph.weights[call_arguments(head)["weight"].name],
        longest=longest or graph.info.max_positions,
    )


def _source(graph: ModelGraph) -> fx.Node:
    """The graph's hidden states."""
    sides = graph.sides()
    if HIDDEN not in sides:
        raise PassError("the graph gives no hidden states", at=graph.info.name, fix="run tap_hidden_states before")
    return sides[HIDDEN]


def _combine(graph: ModelGraph, combination: Combination, checkpoint: DraftCheckpoint, log: RewriteLog) -> None:
    """fc over the states, perhaps after norms."""
    tapped = _source(graph)
    log.step(f"combine the hidden states of  {tapped.name} holds", tapped)
    dtype, width = tapped.meta["val"].dtype, int(tapped.meta["val"].shape[1])

    def weight(name: str) -> fx.Node:
        shape = checkpoint.source.shape(name.removeprefix(PREFIX))
        return new_weight(graph, identifier(name), Stored(name, dtype), tapped.meta["val"].new_empty(shape))

    norms = [weight(name) for name in (*combination.layer_norms, *_given(combination.whole_norm))]
    fc, bias = weight(combination.fc), [weight(name) for name in _given(combination.fc_bias)]
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        call = graph.graph.call_function
        x = tapped
        if combination.whole_norm is not None:
            x = call(_llmc.rms_norm.default, (x, norms[0], combination.eps))
        elif norms:
            part = width // len(norms)
            cut = [call(_aten.slice.Tensor, (x, 1, i * part, (i + 1) * part)) for i in range(len(norms))]
            normed = [
                call(_llmc.rms_norm.default, (piece, norm, combination.eps))
                for piece, norm in zip(cut, norms, strict=True)
            ]
            x = call(_aten.cat.default, (normed, 1))
        x = call(_llmc.linear.default, (x, fc, bias[0] if bias else None))
    output.replace_input_with(tapped, x)


def _given(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)
