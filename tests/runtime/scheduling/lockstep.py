"""Sequences that are parked and resumed, over the pretended model: what beam search does, without its choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request import Forks, Origin, Request
from tests.runtime.model_free import next_token, no_logits


class Lockstep:
    """Sequences that wait for each other at every length, as beams do, until they have `output` tokens.

    There are `width` of them from the first token on. At every third length the last one gives way to one more that
    begins as the first does. live: the present ones. known: where all that ever were are noted.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        output: int,
        width: int,
        known: list[Request],
        *,
        priority: Priority = Priority.FREE,
        salt: bytes | None = None,
        arrived: float | None = None,
        deadline: float | None = None,
    ) -> None:
        self.finished = False
        self.error: RequestError | None = None
        self.live: list[Member] = []
        self._prompt, self._output, self._width, self._known = list(prompt), output, width, known
        self._origin = Origin(priority, salt, arrived, deadline)
        self.first = self._member(self._prompt)
        self.live.append(self.first)

    def advance(self, current: Member, forks: Forks) -> None:
        """When all have got their logits, go on or end. `current` is the one that got them last."""
        if self.finished or any(member.said is None for member in self.live):
            return
        length = len(current.tokens) - len(self._prompt) + 1
        if length >= self._output:
            return self.end(current, forks)
        is_full = len(self.live) == self._width
        parents, lost = (self.live[:-1], self.live[-1:]) if is_full and length % 3 == 0 else (self.live, [])
        children = []
        for number in range(1, self._width - len(parents) + 1):
            parent = parents[(number - 1) % len(parents)]
            assert parent.said is not None
            children.append(self._member([*parent.tokens, (parent.said + number) % 97]))
            forks.fork(parent, children[-1])
        for member in parents:
            assert member.said is not None
            member.tokens.append(member.said)
            member.said = None
            if member is not current:
                forks.resume(member)
        for member in lost:
            member.end()
            if member is not current:
                forks.remove(member)
        self.live = [*parents, *children]

    def end(self, current: Member, forks: Forks) -> None:
        """Nobody goes on; `current` is left to the loop."""
        self.finished = True
        for member in self.live:
            member.end()
            if member is not current:
                forks.remove(member)

    def _member(self, tokens: Sequence[int]) -> Member:
        member = Member(tokens, every_logit=False, origin=self._origin, prompt_length=len(self._prompt))
        member.group = self
        self._known.append(member)
        return member


class Member(Request):
    """One sequence of a group. said: what comes after its tokens, once it has got their logits."""

    group: Lockstep
    said: int | None = None

    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """The last row says what comes, which depends on nobody else."""
        if np.isnan(logits[-1, 0]):
            raise no_logits()
        self.said = int(logits[-1, 0])
        assert self.said == next_token(self.tokens)

    def follow(self, forks: Forks) -> None:
        """Go on with the others."""
        self.group.advance(self, forks)

    def fail(self, error: RequestError) -> None:
        """With all others."""
        super().fail(error)
        self.group.error, self.group.finished = error, True
