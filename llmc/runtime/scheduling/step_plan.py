"""What the scheduler asks of one step: which tokens of which requests, and what became of their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llmc.runtime.requests.request import Request, SampledRequest


class Chunk(NamedTuple):
    """So many tokens of a request from position `start` on; logits are wanted of the last `logit_rows` of them."""

    request: Request
    start: int
    tokens: int
    logit_rows: int


class StepPlan(NamedTuple):
    """What one step computes: first the decodes by place, one token and one row of logits each, then the chunks.

    copies: blocks to be filled from others before the step, {destination: source}; all sources are read first.
    grown: decodes that have got one more block. entered: those that have come to their place, or whose blocks are
    others, since the last step. In both, requests without a place are to be ignored.
    """

    decodes: list[SampledRequest]
    chunks: list[Chunk]
    copies: dict[int, int]
    grown: list[Request]
    entered: list[Request]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def all_chunks(self) -> Iterator[Chunk]:
        """The decodes as chunks, then the chunks. Before the step is published."""
        yield from (Chunk(request, request.computed, 1, 1) for request in self.decodes)
        yield from self.chunks
