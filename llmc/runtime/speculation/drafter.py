"""Drafters, which guess the next tokens of requests."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from llmc.errors import RequestError
from llmc.runtime.requests.boundary import attempts
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft


class Drafter(Protocol):
    """Guesses the next tokens of requests. A request's tokens only grow; the drafter sees them when it is called.

    An exception raised for one request is that request's error. The drafter is not called again afterwards; a new one
    replaces it.
    """

    def sides(self, pays: bool, has_prompts: bool) -> tuple[str, ...]:
        """The side outputs that the next step must leave for `observe`. pays: whether drafts pay now. has_prompts:
        whether the step computes parts of prompts."""
        return ()

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> Sequence[Draft | RequestError]:
        """Return at most `most` draft tokens for each request; NO_DRAFT for none."""

    def observe(self, step: ComputedStep) -> Mapping[Request, RequestError]:
        """Learn the results and accepted drafts of a step that left side outputs or had drafts. Not called by a loop
        without an executor."""
        return {}

    def forget(self, request: SampledRequest) -> None:
        """Drop the state of a request that has ended. Its output may be reused for requests with the same salt; a salt
        of None forbids it."""


class EachDrafter(Drafter, Protocol):
    """A drafter that guesses for one request at a time."""

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """Return at least one and at most `most` draft tokens for the request."""

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> Sequence[Draft | RequestError]:
        """Propose drafts for each request that may have some."""
        wanting = [index for index, count in enumerate(most) if count]
        drafts = attempts(self.draft, [(requests[index], most[index]) for index in wanting])
        proposed: list[Draft | RequestError] = [NO_DRAFT] * len(requests)
        for index, draft in zip(wanting, drafts, strict=True):
            proposed[index] = draft
        return proposed


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """A drafter with its own engine, whose cache has blocks of the same numbers. seats: maximum requests in one of its
    steps."""

    seats: int

    def watch(self, pool: BlockPool) -> None:
        """Set the blocks; called once, before anything else."""

    def close(self) -> None:
        """Free the engine; nothing may follow."""

    def write(self, asked: Sequence[tuple[SampledRequest, int]]) -> Sequence[Draft | RequestError]:
        """The requested number of drafts for each of at most `seats` requests; none for a request that it cannot
        continue yet."""

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> Sequence[Draft | RequestError]:
        """The requested number of drafts, for up to the number of seats requests at a time."""
        proposed: list[Draft | RequestError] = [NO_DRAFT] * len(requests)
        wanting = [index for index, count in enumerate(most) if count]
        for begin in range(0, len(wanting), self.seats):
            group = wanting[begin : begin + self.seats]
            drafts = self.write([(requests[index], most[index]) for index in group])
            for index, draft in zip(group, drafts, strict=True):
                proposed[index] = draft
        return proposed
