"""Run the graph after every pass on real weights, and stop at the first pass that changes the logits too much."""

from collections.abc import Sequence

from torch import Tensor

from llmc.debug.difference import budget, difference
from llmc.errors import LlmcError, PassError
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.weights import WeightSource

_LENGTH = 24


class PassChecker:
    """An observer of run_pipeline that keeps the logits after the pass before, to compare with.

    tokens: token ids to run the graph on; by default 24 ids spread over the vocabulary, or fewer if the model's limit
    is lower.
    """

    def __init__(self, graph: ModelGraph, source: WeightSource, tokens: Sequence[int] | None = None) -> None:
        self._source = source
        self._tokens = example_tokens(graph) if tokens is None else tuple(tokens)
        self._logits = run_tokens(graph, source, self._tokens)
        self.differences: dict[str, float] = {}

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Raise PassError if the pass changed the logits by more than its numerics class allows."""
        if not record.rewrites:
            return
        logits = self._run(record, graph)
        change, allowed = difference(logits, self._logits), budget(record, graph.info.dtype)
        self.differences[record.name] = change.relative
        self._logits = logits
        if not change.within(allowed):
            numbers = f"rewrites #{record.rewrites[0].number} to #{record.rewrites[-1].number}"
            raise PassError(
                f"pass {record.name} changes the logits by {change.relative:.1e} of their spread, "
                f"{record.numerics} allows {allowed:.0e}",
                at=numbers,
                fix=f"build with disable_passes=({record.name!r},), and report the model; "
                "stop_after between these numbers finds the rewrite",
            )

    def _run(self, record: PassRecord, graph: ModelGraph) -> Tensor:
        try:
            return run_tokens(graph, self._source, self._tokens)
        except (LlmcError, MemoryError):
            raise
        except Exception as error:  # An op may raise anything for inputs that a pass has broken.
            raise PassError(
                f"the graph does not run after pass {record.name}: {' '.join(str(error).split())[:300]}",
                at=f"rewrites #{record.rewrites[0].number} to #{record.rewrites[-1].number}",
                fix=f"build with disable_passes=({record.name!r},); LLMC_DEBUG=1 shows the traceback",
            ) from error


def example_tokens(graph: ModelGraph) -> tuple[int, ...]:
    """Token ids spread over the vocabulary, the same each time."""
    length = min(_LENGTH, graph.info.max_positions or _LENGTH)
    return tuple((7 + 37 * i + i * i) % graph.info.vocab_size for i in range(length))
