"""What guesses the next tokens of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmc.runtime.requests.request import SampledRequest


class Drafter(Protocol):
    """Knows requests by what they have said; see llmc/runtime/speculation/speculation.py for who asks."""

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Sequence[int]]:
        """For each request at most so many tokens that may follow its tokens; () for none."""
        ...

    def observe(self, request: SampledRequest, tokens: int) -> None:
        """So many tokens have been appended to request.tokens."""
        ...

    def forget(self, request: SampledRequest) -> None:
        """The request has ended; what it wrote may be learnt from, by its salt; salt None: by nobody."""
        ...
