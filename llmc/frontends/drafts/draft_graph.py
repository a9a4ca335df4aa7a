"""The graph of a draft: its layers, traced like any other model's."""

from dataclasses import replace

import torch

from llmc.frontends.drafts.draft_checkpoint import DraftModule
from llmc.frontends.tracing.fake_copy import make_parameters_fake
from llmc.frontends.tracing.program_graph import graph_from_program
from llmc.frontends.tracing.trace import trace
from llmc.graph.model_graph import AttachedDraft, ModelInfo
from llmc.graph.weights import Stored
from llmc.program import HIDDEN


def attached_draft(draft: DraftModule, method: str, info: ModelInfo) -> AttachedDraft:
    """A graph at stage captured, with the hidden state of each token as an input, fp32, and as a side output.

    method: what the drafter is called, which is the model's family too. info: of the target. Raises CaptureError.
    """
    make_parameters_fake(draft.module)
    program = trace(draft.module, with_positions=True, hidden=draft.width)
    own = replace(info, name=f"{info.name}-{method}", family=method, vocab_size=0, max_positions=None)
    graph = graph_from_program(program, draft.recipes, own, side_outputs=(HIDDEN,))
    offsets = None if draft.id_offsets is None else Stored(draft.id_offsets, torch.int64)
    return AttachedDraft(graph, method, offsets)
