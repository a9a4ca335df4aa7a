"""The number of tokens that drafts gain, by the requested number of drafts: measured in the last steps, and
extrapolated for other numbers."""

import math

from llmc.runtime.speculation.draft import Draft

# Minimum weight of the last value in an average.
_NEW = 1 / 32
# Weight of the last tree in the average depth of trees, whose shape the model decides.
_NEW_DEPTH = 1 / 8
# Prior: as if this number of drafts had been seen, with this share accepted.
_FIRST_SHARE, _FIRST_SEEN = 0.7, 1
# As how many those count that were seen before drafts stopped; and of one depth, those of all depths.
_OLD, _OF_ALL = 8, 8


class _Share:
    """A running share of events for which something was true."""

    def __init__(self, first: float) -> None:
        self.value = first
        self.seen = _FIRST_SEEN

    def note(self, is_true: bool) -> None:
        self.seen += 1
        self.value += max(_NEW, 1 / self.seen) * (is_true - self.value)


class DraftGains:
    """Statistics of requests for which some number of drafts was requested. The drafter may have made fewer, or trees
    of less depth."""

    def __init__(self) -> None:
        # Drafts after accepted ones: their number and the accepted number, in total and by depth.
        self._true, self._true_at = _Share(_FIRST_SHARE), list[_Share]()
        # By number of drafts: whether that number was made.
        self._made: list[_Share] = []
        # Depth of trees by the requested number of drafts; in chains each draft is one deeper.
        self._depths: dict[int, float] = {}

    def note(self, asked: int, draft: Draft, accepted: int) -> None:
        """Record the drafts of one request in one step."""
        depth, drafts = draft.depth, len(draft)
        if draft.parents is not None or asked in self._depths:
            usual = self._depths.setdefault(asked, depth)
            self._depths[asked] = usual + _NEW_DEPTH * (depth - usual)
        for index in range(min(accepted + 1, depth)):
            if index == len(self._true_at):
                self._true_at.append(_Share(self._true.value))
            self._true_at[index].note(accepted > index)
            self._true.note(accepted > index)
        for index in range(asked):
            if index == len(self._made):
                self._made.append(_Share(1.0))
            self._made[index].note(drafts > index)

    def age(self) -> None:
        """Give later observations more weight, because no drafts will be made for a while."""
        for share in (self._true, *self._true_at, *self._made):
            share.seen = min(share.seen, _OLD)

    def tokens(self, asked: int) -> float:
        """Return the expected number of tokens per request and step."""
        expected = path = 1.0
        for index, share in enumerate(self._levels(asked)):
            path *= self._share_true(index)
            expected += path * share
        return expected

    def depth(self, asked: int) -> float:
        """The depth of a draft for a request, to which the time of making it is proportional."""
        return sum(self._levels(asked))

    def drafts(self, asked: int) -> float:
        """Return the expected number of drafts that are made for a request."""
        return sum(self._share_made(index) for index in range(asked))

    def _levels(self, asked: int) -> list[float]:
        """Return for each depth the share of drafts that are at least that deep, or the deepest observed one if more
        were never requested."""
        deepest = self._depths.get(asked) or min(asked, max(self._depths.values(), default=asked))
        return [self._share_made(index) * min(1.0, deepest - index) for index in range(math.ceil(deepest))]

    def _share_made(self, index: int) -> float:
        return self._made[index].value if index < len(self._made) else 1.0

    def _share_true(self, index: int) -> float:
        """The accepted share at a depth; for a rarely observed depth mostly that of all depths."""
        if index >= len(self._true_at):
            return self._true.value
        share = self._true_at[index]
        seen = min(share.seen, 1 / _NEW)
        return (seen * share.value + _OF_ALL * self._true.value) / (seen + _OF_ALL)
