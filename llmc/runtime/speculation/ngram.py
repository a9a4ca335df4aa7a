"""Prompt lookup (Saxena 2023): a request's last tokens have been there before, so what followed them may follow again.

Of several places the most recent counts: on what bard-6m writes greedily (n-grams of 2 to 4, 4 drafts) that gives 2.30
tokens a step and 70% accepted, the first place 2.12 and 55%. Where the text ends, the drafts start again from that
place, so that a text which repeats every token or two gets as many of them as others.
"""

from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.drafter import EachDrafter


class NgramDrafter(EachDrafter):
    """shortest, longest: how many of the last tokens have to match; the longest match counts."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[SampledRequest, NgramIndex] = {}

    def forget(self, request: SampledRequest) -> None:
        """Nothing is learnt from one request for another."""
        self._indexes.pop(request, None)

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """What followed the request's last tokens where they were last seen."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex(request.tokens, self._lengths)
        return Draft(index.continuation(most))


class NgramIndex:
    """Where the n-grams of a list of tokens that grows were last seen. lengths: of n-grams, the longest first.

    Each token is read once, whenever somebody next asks; there is at most one entry a token and length.
    """

    def __init__(self, tokens: list[int], lengths: range) -> None:
        self._tokens = tokens
        self._lengths = lengths
        # By length: the n-gram, and where the token after it is.
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in lengths]
        self._read_to = 0

    def continuation(self, most: int) -> list[int]:
        """At most so many tokens that may come next; none if the last n-grams are new."""
        tokens = self._tokens
        self._read(len(tokens))
        for length, places in zip(self._lengths, self._places, strict=True):
            place = places.get(tuple(tokens[-length:]))
            if place is not None:
                following = tokens[place : place + most]
                return (following * -(-most // len(following)))[:most]
        return []

    def _read(self, end: int) -> None:
        """The n-grams that have a token after them before `end`."""
        tokens, begin = self._tokens, self._read_to
        for length, places in zip(self._lengths, self._places, strict=True):
            for place in range(max(begin, length), end):
                places[tuple(tokens[place - length : place])] = place
        self._read_to = max(begin, end)
