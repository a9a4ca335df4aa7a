"""How many drafts pay: from how often they come true, and from what steps and drafts cost.

With k drafts of which each comes true with probability a, a request gets E(k) = 1 + a + … + a^k tokens a step
(Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"); with a tree of k the sum ends at
its depth, and a is the probability that one of those at a depth comes true. For n requests that takes a step
of n · (1 + k) tokens, and k times what the drafter takes for a draft of each. All three are measured while the engine
runs; before that, and for sizes that were not seen, times are the cost model's, corrected by those that were.
"""

from __future__ import annotations

from llmc.runtime.speculation.step_times import Prior, StepTimes

# Of the average of drafts that came true, what the last one weighs at the least.
_NEW_DRAFT = 0.1
# Drafts have to be that much better than none, since times are noisy.
_LEAST_GAIN = 1.03
# As if so many drafts had been seen already.
_FIRST_ACCEPTANCE, _FIRST_DRAFTS = 0.7, 2
# Steps until a draft more than seems best is tried; doubled each time that it is not.
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 4096
_TRIAL_STEPS = 4
# As long as there are none, steps between two looks whether drafts pay, which takes longer than the rest of a step's
# bookkeeping.
_LOOK_EVERY = 8


class Gate:
    """most: drafts a request and step at the most. prior: of a step by its tokens. draft_prior: of the drafter, for one
    draft of each of so many requests, wrong by the same factor as `prior`; None for next to nothing."""

    def __init__(self, most: int, prior: Prior | None = None, draft_prior: Prior | None = None) -> None:
        self.most = most
        self._acceptance, self._seen = _FIRST_ACCEPTANCE, _FIRST_DRAFTS
        self._prior, self._draft_prior = prior, draft_prior
        self._steps, self._drafting = StepTimes(prior), StepTimes(draft_prior)
        # By how many drafts: how deep they were, in trees less than they are.
        self._depths: dict[int, int] = {}
        self._best = 0
        self._asked: tuple[int, int] | None = None
        self._pause, self._paused, self._trial = _FIRST_PAUSE, 0, 0

    def drafts(self, requests: int, room: int) -> int:
        """How many drafts a request are best in a step of so many requests and at most `room` tokens; once a step."""
        if self._asked == (requests, room) and not self._best and self._paused % _LOOK_EVERY:
            self._paused += 1
            return 0
        self._asked = requests, room
        if self._prior is not None and not self._steps.knows(requests):
            return 0  # What drafts cost shows beside that.
        best, speed = 0, self._speed(requests, 0) * _LEAST_GAIN
        most = max(0, min(self.most, room // requests - 1))
        for count in range(1, most + 1):
            faster = self._speed(requests, count)
            if faster > speed:
                best, speed = count, faster
        return min(best + 1, most) if self._tries(best, most) else best

    def _tries(self, best: int, most: int) -> bool:
        """Whether to try a draft more than seems best: it may have become better, or never have been measured."""
        if self._trial:
            self._trial -= 1
            return True
        if best != self._best:
            self._best, self._pause, self._paused = best, _FIRST_PAUSE, 0
        self._paused += best < most
        if self._paused >= self._pause:
            self._paused, self._pause, self._trial = 0, min(2 * self._pause, _LONGEST_PAUSE), _TRIAL_STEPS
        return False

    def note_drafts(self, proposed: int, accepted: int, depth: int) -> None:
        """Of one request in one step. depth: how many of those proposed could come true."""
        if depth < proposed or self._depths:
            self._depths[proposed] = depth
        for index in range(min(accepted + 1, depth)):
            self._seen += 1
            weight = max(_NEW_DRAFT, 1 / self._seen)
            self._acceptance += weight * ((index < accepted) - self._acceptance)

    def note_step(self, tokens: int, seconds: float) -> None:
        """What a step of so many tokens took, all of them of requests that decode; without the drafter's part."""
        self._steps.note(tokens, seconds)

    def note_drafting(self, requests: int, drafts: int, seconds: float) -> None:
        """What the drafter took for so many drafts of each of so many requests."""
        usual = self._draft_seconds(requests) if self._draft_prior is not None else 0.0
        self._drafting.note(requests, min(seconds / drafts, 4 * usual) if usual else seconds / drafts)

    def seconds(self, requests: int, drafts: int) -> float | None:
        """Of a step with so many drafts of each request, and of making them; None before the first step."""
        step = self._steps.seconds(requests * (1 + drafts))
        return step if step is None or not drafts else step + drafts * self._draft_seconds(requests)

    def _draft_seconds(self, requests: int) -> float:
        measured = self._drafting.seconds(requests)
        if measured is not None or self._draft_prior is None or self._prior is None:
            return measured or 0.0
        step = self._steps.seconds(requests)
        return 0.0 if step is None else self._draft_prior(requests) * step / self._prior(requests)

    def _speed(self, requests: int, count: int) -> float:
        """Tokens a second of one request."""
        # As deep as the deepest where so many were never seen.
        depth = self._depths.get(count) or min(count, max(self._depths.values(), default=count))
        expected = sum(self._acceptance**i for i in range(depth + 1))
        return expected / (self.seconds(requests, count) or 1.0)
