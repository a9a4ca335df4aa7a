"""The scheduler's plan of one step: the tokens of each request, and changes of their blocks."""

from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.speculation.draft import NO_DRAFT, Draft


class Chunk(NamedTuple):
    """So many tokens of a request from position `start` on; logits are wanted of the last `logit_rows` of them.

    draft: tokens that may follow the request's own, the last ones of the chunk; logits are wanted of each and of the
    token before them.
    """

    request: Request
    start: int
    tokens: int
    logit_rows: int
    draft: Draft = NO_DRAFT

    @property
    def token_ids(self) -> list[int]:
        """Ids of the chunk's tokens, including drafts."""
        reading = self.request.standing.reading
        if reading is not None:
            return reading.token_ids(self.start, self.tokens)
        return [*self.request.tokens[self.start : self.start + self.tokens - len(self.draft)], *self.draft.tokens]


class StepPlan(NamedTuple):
    """The work of one step: first the decodes by place, with one token and one row of logits each, then the chunks.

    copies: blocks to be filled from others before the step, {destination: source}; all sources are read first.
    group_copies: the same for the groups of caches after the first, by group. grown: decodes that have got one more
    block. entered: those that got their place, or whose blocks changed, since the last step. In both, requests without
    a place are to be ignored.
    """

    decodes: list[SampledRequest]
    chunks: list[Chunk]
    copies: dict[int, int]
    grown: list[Request]
    entered: list[Request]
    group_copies: dict[int, dict[int, int]]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


@dataclass(slots=True)
class StepOutline:
    """A step under construction, without its decodes.

    tokens, rows: the remaining room. unfinished: requests with tokens that are not in this step, because it has no room
    for them, or because a table is cut or a state is kept before them.
    """

    tokens: int
    rows: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    grown: list[Request] = field(default_factory=list)
    group_copies: dict[int, dict[int, int]] = field(default_factory=dict)
    unfinished: list[Request] = field(default_factory=list)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are to be filled from others before the step."""
        return bool(self.copies) or any(self.group_copies.values())

    def copies_of(self, group: int) -> dict[int, int]:
        """Return which blocks of a group of caches are copied from which others."""
        return self.group_copies.get(group, {}) if group else self.copies

    def include(self, request: Request, count: int, draft: Draft = NO_DRAFT) -> None:
        """The request's next `count` tokens, drafts among them, and the rows of logits that it needs after them."""
        rows = count if draft else request.logit_rows(count)
        if not draft and (count < request.pending or request.standing.reading is not None):
            self.unfinished.append(request)
        self.chunks.append(Chunk(request, request.computed, count, rows, draft))
        self.tokens -= count
        self.rows -= rows
