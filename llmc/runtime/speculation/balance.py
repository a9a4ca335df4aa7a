"""The balance of time gained and lost by drafts against decoding without them. They may lose at most a hundredth of the
time.

A prediction may be wrong repeatedly, in ways that no measurement of its parts shows. The time of each step with drafts
is therefore compared with the time that its tokens would have taken without. If too much is lost, drafting pauses until
the loss is compensated. The tokens that a drafter reads at its start also count as lost, but pay off later: they do not
stop drafting as long as drafts seem to pay.
"""

# The share of all time that drafts may lose.
_ALLOWANCE = 0.01
# In steps without drafts: what may be lost before drafts stop, what is remembered of gains, and of losses.
_LEAST, _MOST, _FORGIVEN = -8.0, 16.0, -64.0
# And what is there to lose before drafts are tried.
_TRIAL = 1.0


class Balance:
    """The balance, in units of steps without drafts. may_draft: whether drafting that seems to pay is allowed."""

    def __init__(self) -> None:
        self._steps = self._invested = 0.0
        self.may_draft = True

    def note(self, taken: float, worth: float) -> None:
        """Record a step. taken: its time; worth: the time that its tokens would have taken without drafts."""
        gain = worth - taken + _ALLOWANCE * taken
        returned = max(0.0, min(gain, self._invested))
        self._invested -= returned
        self._steps += gain - returned
        self._steps = max(_FORGIVEN, min(self._steps, _MOST))
        if self._steps < _LEAST:
            self.may_draft = False
        elif self._steps >= 0:
            self.may_draft = True

    def invest(self, taken: float) -> None:
        """Record time, in addition to that, which will serve later steps."""
        self._invested = min(self._invested + taken, -_FORGIVEN)

    @property
    def may_try(self) -> bool:
        """Whether drafts that seem not to pay may be tried."""
        return self._steps - self._invested >= _TRIAL
