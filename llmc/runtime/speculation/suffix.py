"""Suffix decoding (Oliaro et al. 2024): the tokens that followed the last tokens before, in this request or earlier
answers.

As in Arctic Inference, there is one structure for the request's own prompt and output, and one for the outputs of
earlier requests of the same tenant (not for their prompts). The draft with more expected accepted tokens is used.
"""

from dataclasses import dataclass

from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.drafter import EachDrafter
from llmc.runtime.speculation.earlier_answers import EarlierAnswers
from llmc.runtime.speculation.suffix_automaton import NO_CONTINUATION, SuffixAutomaton

# Tokens of one request that a step reads at most: a long prompt would hold up the others.
_READ_AT_ONCE = 2048


@dataclass(slots=True)
class _Own:
    """The state of a request. read: number of its tokens in the automaton."""

    automaton: SuffixAutomaton
    read: int = 0


class SuffixDrafter(EachDrafter):
    """Drafts the likeliest continuation from suffix automata. depth: maximum length of match and draft together.
    factor: drafted tokens per matching token. least: minimum probability of a draft as a whole. earlier: outputs of
    other requests of the same salt."""

    def __init__(self, depth: int, factor: float, least: float, earlier: EarlierAnswers) -> None:
        self._depth = depth
        self._factor = factor
        self._least = least
        self._earlier = earlier
        self._own: dict[SampledRequest, _Own] = {}

    def forget(self, request: SampledRequest) -> None:
        """Keep the request's output for requests with the same salt: once, and only if drafts were requested for it."""
        if self._own.pop(request, None) is not None:
            self._earlier.add(request.salt, request.tokens[request.prompt_tokens :])

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """The most likely continuation of the request, from itself or from earlier answers."""
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = _Own(SuffixAutomaton(self._depth))
        tokens = request.tokens
        begin, own.read = own.read, min(own.read + _READ_AT_ONCE, len(tokens))
        own.automaton.extend(tokens[begin : own.read])
        limits = (most, self._factor, self._least)
        continuations = [earlier.draft(earlier.match(tokens), *limits) for earlier in self._earlier.of(request.salt)]
        if own.read == len(tokens):
            continuations.insert(0, own.automaton.draft(own.automaton.end, *limits))
        return Draft(max(continuations, key=lambda continuation: continuation.score, default=NO_CONTINUATION).tokens)
