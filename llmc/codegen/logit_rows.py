"""Limit an engine's output buffer to the requested logit rows instead of all tokens."""

from llmc.errors import LoweringError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render_type
from llmc.graph.step_inputs import has_selected_logits


def check_logit_rows(graph: ModelGraph) -> None:
    """Raise LoweringError if a step of the graph would write more rows than the caller's buffer holds."""
    if not has_selected_logits(graph):
        logits = graph.logits()
        raise LoweringError(
            f"{logits.name} is {render_type(logits)}, but an engine has room only for the logits of the rows asked for",
            at=logits.name,
            fix="let select_logit_rows run: do not disable it, and do not cut the pipeline before it",
        )
