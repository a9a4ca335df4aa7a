"""Every substring of some texts, its frequency and its continuations: a suffix automaton that grows at its end.

A state stands for substrings that end at the same places, so a text of n tokens has at most 2n states (Blumer et al.
1985). Its suffix link leads to the longest suffix that also ends elsewhere. Counts are right for substrings of at most
`depth` tokens: adding a token takes at most that many operations, however often a text repeats itself.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ROOT = 0


class Match(NamedTuple):
    """A substring of `length` tokens, by its state."""

    state: int
    length: int


class Continuation(NamedTuple):
    """Tokens that may come next. score: expected number of accepted tokens."""

    tokens: Sequence[int]
    score: float


NO_CONTINUATION = Continuation((), 0.0)


class SuffixAutomaton:
    """Texts are added in order; the last one may be continued. depth: maximum length of match and draft together."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        # Length of a state's longest substring.
        self._length = [0]
        self._count = [0]
        self._last = _ROOT
        # The state of the last `depth` tokens at most, and how many those are.
        self._suffix, self._matched = _ROOT, 0

    def begin_text(self) -> None:
        """Begin a new text, which does not continue the previous one."""
        self._last = self._suffix = _ROOT
        self._matched = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        count, link = self._count, self._link
        for token in tokens:
            self._append(token)
            self._follow(token)
            state = self._suffix
            while state != _ROOT:
                count[state] += 1
                state = link[state]

    @property
    def end(self) -> Match:
        """The last tokens that were added."""
        return Match(self._suffix, self._matched)

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest suffix of the tokens that occurs here, of at most `depth` tokens."""
        following, link = self._next, self._link
        state, matched = _ROOT, 0
        for token in tokens[max(0, len(tokens) - self._depth) :]:
            while state != _ROOT and token not in following[state]:
                state = link[state]
                matched = self._length[state]
            if token in following[state]:
                state = following[state][token]
                matched += 1
        return Match(state, matched)

    def draft(self, match: Match, most: int, factor: float, least: float) -> Continuation:
        """The most likely continuation: the best draft after any suffix of the match.

        At most `most` tokens, at most `factor` times the length of the suffix, and together with it at most `depth`.
        least: minimum probability of the whole draft.
        """
        state, matched = match
        best = NO_CONTINUATION
        # From the longest suffix on: shorter ones give shorter drafts, and none that is better than certain.
        while matched and min(most, int(matched * factor)) > best.score:
            shorter = self._length[self._link[state]]
            draft = self._likeliest(state, min(most, self._room(shorter + 1, matched, factor)), least)
            if draft.score > best.score:
                best = draft
            state, matched = self._link[state], shorter
        return best

    def _room(self, shortest: int, longest: int, factor: float) -> int:
        """Maximum length of a draft after a suffix of `shortest` to `longest` tokens: longer suffixes allow more
        tokens, and leave less depth."""
        peak = int(self._depth / (1 + factor))
        lengths = (min(max(n, shortest), longest) for n in (peak, peak + 1))
        return max(min(int(n * factor), self._depth - n) for n in lengths)

    def _likeliest(self, state: int, budget: int, least: float) -> Continuation:
        """Return the chain of the most frequent next tokens from a state on, while the draft is likely enough."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < budget:
            best = total = chosen = 0
            for token, child in self._next[state].items():
                count = self._count[child]
                total += count
                if count > best:
                    best, chosen = count, token
            if not best or (probability := probability * best / total) < least:
                break
            tokens.append(chosen)
            score += probability
            state = self._next[state][chosen]
        return Continuation(tokens, score)

    def _append(self, token: int) -> None:
        """Extend all suffixes of the text by the token."""
        last, following = self._last, self._next
        known = following[last].get(token)
        if known is not None:
            self._last = self._exactly(last, token, known)
            return
        self._last = added = self._add_state({}, self._length[last] + 1, _ROOT, 0)
        state = last
        while state >= 0 and token not in following[state]:
            following[state][token] = added
            state = self._link[state]
        if state >= 0:
            self._link[added] = self._exactly(state, token, following[state][token])

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state of exactly the substrings of `state` followed by the token; split off `target` if that has longer
        ones."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._add_state(self._next[target].copy(), length, self._link[target], self._count[target])
        self._link[target] = split
        if self._suffix == target and self._matched <= length:
            self._suffix = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add_state(self, following: dict[int, int], length: int, link: int, count: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1

    def _follow(self, token: int) -> None:
        """Move on to the state of the last `depth` tokens."""
        state = self._next[self._suffix][token]
        self._matched += 1
        if self._matched > self._depth:
            self._matched = self._depth
            if self._length[self._link[state]] >= self._depth:
                state = self._link[state]
        self._suffix = state
