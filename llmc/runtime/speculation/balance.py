"""What drafts have gained and lost, against decoding without them: they may lose a hundredth of the time, no more.

A prediction may be wrong again and again, in ways that no measurement of its parts shows. So the time of each step with
drafts is compared with what its tokens would have taken without; who has lost too much waits until that is made up for.
What a drafter reads when it begins is lost, too, but pays only later: as long as drafts seem to pay it ends nothing.
"""

# Of all time, what drafts may lose.
_ALLOWANCE = 0.01
# In steps without drafts: what may be lost before drafts stop, what is remembered of gains, and of losses.
_LEAST, _MOST, _FORGIVEN = -8.0, 16.0, -64.0
# And what is there to lose before drafts are tried.
_TRIAL = 1.0


class Balance:
    """In steps without drafts. may_draft: whether drafts that seem to pay are to be believed."""

    def __init__(self) -> None:
        self._steps = self._invested = 0.0
        self.may_draft = True

    def note(self, taken: float, worth: float) -> None:
        """A step took so long, of the time of a step without drafts, and its tokens would have taken `worth`."""
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
        """Beside that, what took so long will serve later steps."""
        self._invested = min(self._invested + taken, -_FORGIVEN)

    @property
    def may_try(self) -> bool:
        """Whether drafts may be tried that seem not to pay."""
        return self._steps - self._invested >= _TRIAL
