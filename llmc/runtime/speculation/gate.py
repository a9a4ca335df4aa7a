"""How many drafts pay: from how often they come true, and from what a step costs by its tokens.

With k drafts of which each comes true with probability a, a request gets E(k) = 1 + a + … + a^k tokens a step
(Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"), in the time of n · (1 + k) tokens.
Both a and the times are measured while the engine runs. A step of a size that was never seen is taken to cost the least
that it may, as much as the next smaller one or, below all, in proportion: so what could be better is tried, once.
"""

from __future__ import annotations

import bisect

# Of an average, what the last value weighs.
_NEW_TIME = 0.2
_NEW_DRAFT = 0.1
# Drafts have to be that much better than none, since times are noisy.
_LEAST_GAIN = 1.03
_FIRST_ACCEPTANCE = 0.7
# Steps until drafts that did not come true are tried again; doubled each time that they do not.
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 4096
_TRIAL_STEPS = 4
# Steps after which times are measured anew: of a size that seemed slow once, perhaps by chance, there are no others.
_REMEMBERED_STEPS = 1024


class Gate:
    """most: drafts a request and step at the most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._acceptance = _FIRST_ACCEPTANCE
        self._tokens: list[int] = []
        self._seconds: dict[int, float] = {}
        self._steps = 0
        self._pause = _FIRST_PAUSE
        self._paused = 0
        self._trial = 0

    def drafts(self, requests: int, room: int) -> int:
        """How many drafts a request are best in a step of so many requests and at most `room` tokens; once a step."""
        if self._trial:
            self._trial -= 1
            return min(1, max(0, room // requests - 1))
        best, speed = 0, self._speed(requests, 0) * _LEAST_GAIN
        for count in range(1, min(self.most, room // requests - 1) + 1):
            faster = self._speed(requests, count)
            if faster > speed:
                best, speed = count, faster
        if best:
            self._pause, self._paused = _FIRST_PAUSE, 0
        else:
            self._paused += 1
            if self._paused >= self._pause:
                self._paused, self._pause, self._trial = 0, min(2 * self._pause, _LONGEST_PAUSE), _TRIAL_STEPS
        return best

    def note_drafts(self, proposed: int, accepted: int) -> None:
        """Of one request in one step."""
        for index in range(min(accepted + 1, proposed)):
            self._acceptance += _NEW_DRAFT * ((index < accepted) - self._acceptance)

    def note_step(self, tokens: int, seconds: float) -> None:
        """What a step of so many tokens took, all of them of requests that decode."""
        self._steps += 1
        if self._steps % _REMEMBERED_STEPS == 0:
            self._tokens.clear()
            self._seconds.clear()
        known = self._seconds.get(tokens)
        if known is None:
            bisect.insort(self._tokens, tokens)
            self._seconds[tokens] = seconds
        else:
            # One that was held up counts as twice the usual at most.
            self._seconds[tokens] += _NEW_TIME * (min(seconds, 2 * known) - known)

    def seconds(self, tokens: int) -> float | None:
        """Of a step of so many tokens, as measured, or the least that it may take; None before the first step."""
        if not self._tokens:
            return None
        index = bisect.bisect_right(self._tokens, tokens)
        if not index:
            return self._seconds[self._tokens[0]] * tokens / self._tokens[0]
        return self._seconds[self._tokens[index - 1]]

    def _speed(self, requests: int, count: int) -> float:
        """Tokens a second of one request."""
        expected = sum(self._acceptance**i for i in range(count + 1))
        return expected / (self.seconds(requests * (1 + count)) or 1.0)
