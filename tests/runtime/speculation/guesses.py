"""A drafter that knows what comes next, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from llmc.errors import RequestError
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft import MOST_NODES, Draft
from llmc.runtime.speculation.drafter import Drafter
from llmc.runtime.speculation.gate import Gate
from tests.random_trees import path_to, random_tree


def proposed(found: Sequence[Draft | RequestError]) -> list[Draft]:
    """What was proposed, where no request has failed."""
    all_drafts = [draft for draft in found if isinstance(draft, Draft)]
    assert len(all_drafts) == len(found)
    return all_drafts


class Guesses(Drafter):
    """truth: the token after these. Each draft is it with probability `right`, else any of the vocabulary. least: how
    many it gives, where so many are asked for."""

    def __init__(
        self, truth: Callable[[Sequence[int]], int], vocabulary: int, right: float = 0.7, least: int = 0
    ) -> None:
        self._truth, self._vocabulary, self._right, self._least = truth, vocabulary, right, least
        self._random = random.Random(0)
        self.forgotten: list[SampledRequest] = []

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []
        for request, count in zip(requests, most, strict=True):
            tokens = list(request.tokens)
            for _ in range(self._random.randint(min(self._least, count), count)):
                is_right = self._random.random() < self._right
                tokens.append(self._truth(tokens) if is_right else self._random.randrange(self._vocabulary))
            drafts.append(Draft(tokens[len(request.tokens) :]))
        return drafts

    def forget(self, request: SampledRequest) -> None:
        self.forgotten.append(request)


class Trees(Guesses):
    """The same as trees of every form: of what may follow a path, one token at the most is right."""

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        return [
            self._tree(request.tokens, self._random.randint(min(self._least, count), count))
            for request, count in zip(requests, most, strict=True)
        ]

    def _tree(self, tokens: Sequence[int], nodes: int) -> Draft:
        form = random_tree(self._random, min(nodes, MOST_NODES), self._vocabulary)
        drafted: list[int] = []
        for node in range(len(form)):
            path = [drafted[ancestor] for ancestor in path_to(form, node)[:-1]]
            siblings = [drafted[sibling] for sibling in range(node) if form.parent(sibling) == form.parent(node)]
            true = self._truth([*tokens, *path])
            is_right = self._random.random() < self._right and true not in siblings
            drafted.append(true if is_right else form.tokens[node])
        return Draft(drafted, form.parents)


class Open(Gate):
    """As many drafts as there is room for, however long steps take."""

    def drafts(self, requests: int, room: int) -> int:
        return max(0, min(self.most, room // requests - 1))


class Wavering(Open):
    """Open for five steps, closed for three."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._step = 0

    def drafts(self, requests: int, room: int) -> int:
        self._step += 1
        return super().drafts(requests, room) if self._step % 8 < 5 else 0
