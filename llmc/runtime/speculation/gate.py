"""The number of drafts that pays off, from the tokens they gain and the time of steps and drafts.

With k drafts a request gets the tokens that `DraftGains` expects of a step (if each draft is accepted with probability
a, 1 + a + … + a^k: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"). For
n requests that takes a step of n · (1 + k) tokens, and the drafter's time for a draft of each, times the depth of
drafts. All of these are measured while the engine runs, with the overhead of steps. Before that, and for sizes that
were not observed, times come from the cost model, corrected by observations. `Balance` checks the outcome.
"""

from llmc.runtime.speculation.balance import Balance
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.draft_gains import DraftGains
from llmc.runtime.speculation.step_times import Prior, StepTimes

# Drafts have to be that much better than none, since times are noisy.
_LEAST_GAIN = 1.03
# Number of steps without drafts that are measured at the start, and again after this number of steps with drafts.
_FIRST_STEPS, _DRAFTED_STEPS = 2, 1024
# Steps until more drafts than seem best are tried; where some pay, doubled each time that more do not.
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 4096
_TRIAL_STEPS = 4
# A decision takes longer than the rest of a step's bookkeeping: as long as decisions agree, the number of steps between
# them doubles, up to this maximum.
_LONGEST_LOOK = 16
# Numbers of drafts that are considered if more than four are possible; others are not considered.
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Gate:
    """Chooses the number of drafts per request. most: maximum drafts per request and step. prior: predicted time of a
    step by its tokens. draft_prior: predicted time of the drafter for one draft of each of a number of requests, off by
    the same factor as `prior`; None if negligible."""

    def __init__(self, most: int, prior: Prior | None = None, draft_prior: Prior | None = None) -> None:
        self.most = most
        self._prior, self._draft_prior = prior, draft_prior
        self._gains, self._balance = DraftGains(), Balance()
        # Steps without drafts by their requests, all steps by their tokens, drafting by requests.
        self._plain, self._steps, self._drafting = StepTimes(prior), StepTimes(prior), StepTimes(draft_prior)
        self._best = self._left = self._since_plain = 0
        self._look = 1
        self._requests = self._room = 0
        self._pause, self._paused, self._trial = _FIRST_PAUSE, 0, 0

    def drafts(self, requests: int, room: int) -> int:
        """The best number of drafts per request in a step of `requests` requests and at most `room` tokens; called once
        per step."""
        if self._left and requests == self._requests and room == self._room:
            self._left -= 1
            return self._best
        self._requests, self._room, self._left = requests, room, 0
        if self._plain.times(requests) < _FIRST_STEPS:
            return 0  # The cost of drafts is visible against it.
        most = max(0, min(self.most, room // requests - 1))
        best = self._best_count(requests, most) if self._balance.may_draft else 0
        if self._tries(best, most):
            return min(most, next(count for count in (*_COUNTS, most) if count > best or count >= most))
        self._look = min(2 * self._look, _LONGEST_LOOK) if best == self._best else 1
        self._left = self._look - 1
        if best != self._best:
            if not best:
                self._gains.age()
            self._best, self._pause, self._paused = best, _FIRST_PAUSE, 0
        return best

    def _best_count(self, requests: int, most: int) -> int:
        best, speed = 0, self._speed(requests, 0) * _LEAST_GAIN
        for count in (*(smaller for smaller in _COUNTS if smaller < most), *([most] if most else [])):
            faster = self._speed(requests, count)
            if faster > speed:
                best, speed = count, faster
        return best

    def _tries(self, best: int, most: int) -> bool:
        """Whether to try more drafts than seem best: they may have become better, or never have been measured."""
        if self._trial:
            self._trial -= 1
            if not (self._trial or best):
                self._gains.age()
            return self._trial > 0
        if best >= most or best != self._best:
            return False
        self._paused += self._look
        if self._paused < self._pause or not (best or self._balance.may_try):
            return False
        self._paused, self._trial = 0, _TRIAL_STEPS
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if best else _FIRST_PAUSE
        return True

    def rest(self) -> int:
        """Number of steps with the same number of requests for which `drafts` would return the same. It is not called
        in these steps, and their outcome is not recorded."""
        steps, self._left = max(0, self._left - 1), min(self._left, 1)
        return steps

    @property
    def wants_time(self) -> bool:
        """Whether `note_plain` must be called for a step without drafts: for one in a few, and not for steps in which
        `drafts` was called."""
        return not self._left

    def note_plain(self, requests: int, seconds: float) -> None:
        """Record the time of a step without drafts and with `requests` decoding requests."""
        self._since_plain = 0
        self._plain.note(requests, seconds)
        self._steps.note(requests, seconds)
        self._balance.note(self._look, self._look)

    def note_drafts(self, asked: int, draft: Draft, accepted: int) -> None:
        """Record one request's draft in a step, for which `asked` drafts were requested."""
        self._gains.note(asked, draft, accepted)

    def note_drafted(
        self, requests: int, tokens: int, gained: int, seconds: float, drafting: float, *, has_read: bool = False
    ) -> None:
        """Record a step of `requests` requests with drafts and `tokens` tokens, which gave all requests together
        `gained` tokens. seconds: its time without the drafter. drafting: the drafter's time; has_read: whether that
        includes one-time reading."""
        self._since_plain += 1
        self._steps.note(tokens, seconds)
        plain = self.seconds(requests, 0)
        if self._since_plain >= _DRAFTED_STEPS:
            self._plain.forget()
            self._since_plain = 0
        if plain:
            # One that was held up counts as in the average.
            usual = min(seconds, 2 * (self._steps.seconds(tokens) or seconds))
            own = min(drafting, (tokens / requests - 1) * self._draft_seconds(requests)) if has_read else drafting
            self._balance.note((usual + own) / plain, gained / requests)
            self._balance.invest((drafting - own) / plain)

    def note_drafting(self, requests: int, depth: int, seconds: float) -> None:
        """Record the drafter's time for drafts of that depth for each of `requests` requests."""
        usual = self._draft_seconds(requests) if self._draft_prior is not None else 0.0
        self._drafting.note(requests, min(seconds / depth, 4 * usual) if usual else seconds / depth)

    def seconds(self, requests: int, drafts: int) -> float | None:
        """Return the seconds of a step with `drafts` drafts per request, including making them; None before the first
        step."""
        if not drafts:
            plain, step = self._plain.seconds(requests), self._steps.seconds(requests)
            # It takes no longer than one with drafts: it may have been held up.
            return step if plain is None or step is None else min(plain, step)
        count = self._gains.drafts(drafts)
        step = self._steps.seconds(round(requests * (1 + count)))
        return step if step is None else step + self._gains.depth(drafts) * self._draft_seconds(requests)

    def _draft_seconds(self, requests: int) -> float:
        measured = self._drafting.seconds(requests)
        if measured is not None or self._draft_prior is None or self._prior is None:
            return measured or 0.0
        step = self.seconds(requests, 0)
        return 0.0 if step is None else self._draft_prior(requests) * step / self._prior(requests)

    def _speed(self, requests: int, count: int) -> float:
        """Return the tokens per second of one request."""
        return self._gains.tokens(count) / (self.seconds(requests, count) or 1.0)
