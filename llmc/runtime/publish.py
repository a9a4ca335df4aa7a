"""Run a step and give each request what it asked for: logits, or a token that was chosen where the logits are."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.executors.executor import ChoosingExecutor, Executor
from llmc.runtime.row_choice import BEST, RowChoices, least_wanted
from llmc.runtime.scheduler import Chunk
from llmc.runtime.step_inputs import Step


def run_and_publish(executor: Executor, step: Step, chunks: Sequence[Chunk]) -> None:
    """Compute the step of these chunks; their requests receive its results in order."""
    if isinstance(executor, ChoosingExecutor) and any(c.request.choice for c in chunks if c.logit_rows):
        _choose(executor, step, chunks)
        return
    logits, row = executor.step(step), 0
    for chunk in chunks:
        chunk.request.computed += chunk.count
        if chunk.logit_rows:
            chunk.request.receive(chunk.request.computed - chunk.logit_rows, logits[row : row + chunk.logit_rows])
        row += chunk.logit_rows


def _choose(executor: ChoosingExecutor, step: Step, chunks: Sequence[Chunk]) -> None:
    """Tokens for the requests that the device can choose for, logits for the others and for rows it left open."""
    choices = [chunk.request.choice for chunk in chunks for _ in range(chunk.logit_rows)]
    chosen = executor.choose(step, least_wanted(choices), RowChoices.of([choice or BEST for choice in choices]))
    logits = None if all(choices) else executor.logits(0, len(choices))
    row = 0
    for chunk in chunks:
        request, first = chunk.request, row
        row += chunk.logit_rows
        request.computed += chunk.count
        if not chunk.logit_rows:
            continue
        if choices[first] is not None and chosen.covered[first]:
            request.receive_token(int(chosen.tokens[first]), float(chosen.scores[first]))
        else:
            found = executor.logits(first, chunk.logit_rows) if logits is None else logits[first:row]
            request.receive(request.computed - chunk.logit_rows, found)
