"""A step that has run and whose requests have got their tokens, as a drafter sees it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.runtime.executors.executor import Executor, SideArray, SideOutputExecutor
from llmc.runtime.loop.judged_results import StepResults
from llmc.runtime.requests.request import Request
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.speculation.draft import NO_DRAFT, Draft


class ComputedChunk(NamedTuple):
    """What a step computed of a request: `tokens` tokens from position `start` on, drafts among them.

    token_row, logit_row: which row of the step's tokens and of its logit rows is the first of it; the `logit_rows`
    rows are of its last tokens. own: which of its tokens are the request's own, in order: all that are no drafts, and
    the drafts that came true and were followed by another token. draft: those, the last of its tokens.
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
        """Of the last token that is the request's own; None where no logits of it were asked for."""
        row = self.own[-1] - (self.tokens - self.logit_rows)
        return self.logit_row + row if row >= 0 else None


@dataclass(frozen=True)
class ComputedStep:
    """plan: as it was computed. sides: the side outputs that it left. executor: holds them until the next step.
    results: of the step."""

    plan: StepPlan
    sides: tuple[str, ...]
    executor: Executor
    results: StepResults

    def side_output(self, name: str) -> SideArray:
        """One that the drafter asked for: [T or L, columns], overwritten by the next step. Rows beyond the step's own
        may follow."""
        assert isinstance(self.executor, SideOutputExecutor)
        return self.executor.side_output(name)

    def chunks(self) -> Iterator[ComputedChunk]:
        """What was computed, request by request: those that decode first, in the order of the rows."""
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
