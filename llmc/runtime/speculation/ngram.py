"""Prompt lookup (Saxena 2023): if a request's last tokens occurred before, the tokens that followed them may follow
again.

The most recent of several places is used: on bard-6m's greedy text (n-grams of 2 to 4, 4 drafts) it gives 2.30 tokens
per step and 70% accepted, the first place 2.12 and 55%. At the end of the text, drafts start again from that place, so
that a text that repeats every token or two also gets all of them.
"""

from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.drafter import EachDrafter


class NgramDrafter(EachDrafter):
    """Drafts the tokens that followed the last tokens earlier. shortest, longest: number of last tokens that must
    match; the longest match is used."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[SampledRequest, NgramIndex] = {}

    def forget(self, request: SampledRequest) -> None:
        """Drop the request's n-grams, which are not kept for other requests."""
        self._indexes.pop(request, None)

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """The continuation of the request's last tokens at their last occurrence."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex(request.tokens, self._lengths)
        return Draft(index.continuation(most))


class NgramIndex:
    """The last places of the n-grams of a growing list of tokens. lengths: the lengths of n-grams, the longest first.

    Each token is indexed once, at the next query; there is at most one entry per token and length.
    """

    def __init__(self, tokens: list[int], lengths: range) -> None:
        self._tokens = tokens
        self._lengths = lengths
        # By length: the n-gram, and where the token after it is.
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in lengths]
        self._read_to = 0

    def continuation(self, most: int) -> list[int]:
        """Return at most `most` tokens that may come next; none if the last n-grams are new."""
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
