"""A step that has run and whose requests have got their tokens, for drafters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.runtime.executors.executor import Executor, SideArray, SideOutputExecutor
from llmc.runtime.loop.judged_results import StepResults
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.speculation.draft import NO_DRAFT, Draft


class ComputedChunk(NamedTuple):
    """The part of a step that belongs to a request: `tokens` tokens from position `start` on, including drafts.

    token_row, logit_row: its first row among the step's tokens and logit rows; the `logit_rows` rows belong to its last
    tokens. own: the request's own tokens, in order: all that are not drafts, and accepted drafts that were followed by
    another token. draft: the drafts, which are its last tokens.
    """

    request: Request
    start: int
    tokens: int
    token_row: int
    logit_row: int
    logit_rows: int
    own: Sequence[int]
    draft: Draft = NO_DRAFT

    @property
    def last_logit_row(self) -> int | None:
        """The logit row of the request's own last token; None if its logits were not requested."""
        row = self.own[-1] - (self.tokens - self.logit_rows)
        return self.logit_row + row if row >= 0 else None


@dataclass(frozen=True)
class ComputedStep:
    """A step that was computed, for drafters. plan: the plan of the step. sides: the side outputs that it left.
    executor: holds them until the next step. results: the results of the step."""

    plan: StepPlan
    sides: tuple[str, ...]
    executor: Executor
    results: StepResults

    def side_output(self, name: str) -> SideArray:
        """A side output that the drafter requested: [T or L, columns], overwritten by the next step. More rows than the
        step's own may follow."""
        assert isinstance(self.executor, SideOutputExecutor)
        return self.executor.side_output(name)

    def chunks(self) -> Iterator[ComputedChunk]:
        """The computed parts by request: decodes first, in the order of rows."""
        for row, request in enumerate(self.plan.decodes):
            yield ComputedChunk(request, len(request.tokens) - 2, 1, row, row, 1, (0,))
        token_row = logit_row = len(self.plan.decodes)
        for chunk in self.plan.chunks:
            draft = chunk.draft
            first = chunk.tokens - len(draft)
            # The last token has been drawn only now.
            path = draft.path(chunk.request.tokens[chunk.start + first : -1])
            own = [*range(first), *(first + node for node in path)]
            yield ComputedChunk(
                chunk.request, chunk.start, chunk.tokens, token_row, logit_row, chunk.logit_rows, own, draft
            )
            token_row += chunk.tokens
            logit_row += chunk.logit_rows
