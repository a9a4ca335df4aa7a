"""How many tokens drafts bring, by how many are asked for: as seen in the last steps, for the others as these go on."""

import math

from llmc.runtime.speculation.draft import Draft

# Of an average, what the last value weighs at the least.
_NEW = 1 / 32
# Of the average depth of trees, which are of the model's own making, what the last one weighs.
_NEW_DEPTH = 1 / 8
# As if so many drafts had been seen already, and this share of them had come true.
_FIRST_SHARE, _FIRST_SEEN = 0.7, 1
# As how many those count that were seen before drafts stopped; and of one depth, those of all depths.
_OLD, _OF_ALL = 8, 8


class _Share:
    """How often something is true."""

    def __init__(self, first: float) -> None:
        self.value = first
        self.seen = _FIRST_SEEN

    def note(self, is_true: bool) -> None:
        self.seen += 1
        self.value += max(_NEW, 1 / self.seen) * (is_true - self.value)


class DraftGains:
    """Steps of requests that were asked for some number of drafts. Fewer may have been made, or trees of less depth."""

    def __init__(self) -> None:
        # Of drafts that followed true ones, how many were true: all, and by depth, from the first on.
        self._true, self._true_at = _Share(_FIRST_SHARE), list[_Share]()
        # By number: whether so many were made.
        self._made: list[_Share] = []
        # Of trees, by how many drafts were asked for; else each is one deeper.
        self._depths: dict[int, float] = {}

    def note(self, asked: int, draft: Draft, accepted: int) -> None:
        """Of one request in one step."""
        depth, made = draft.depth, len(draft)
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
            self._made[index].note(made > index)

    def age(self) -> None:
        """Nothing will be seen for a while: let what is seen then count more."""
        for share in (self._true, *self._true_at, *self._made):
            share.seen = min(share.seen, _OLD)

    def tokens(self, asked: int) -> float:
        """That a request gets of a step."""
        found = path = 1.0
        for index, share in enumerate(self._levels(asked)):
            path *= self._share_true(index)
            found += path * share
        return found

    def depth(self, asked: int) -> float:
        """Of the draft that is made for a request: what making it takes goes with this."""
        return sum(self._levels(asked))

    def drafts(self, asked: int) -> float:
        """That are made for a request."""
        return sum(self._share_made(index) for index in range(asked))

    def _levels(self, asked: int) -> list[float]:
        """By depth, how often a draft is as deep: as the deepest where so many were never asked for."""
        deepest = self._depths.get(asked) or min(asked, max(self._depths.values(), default=asked))
        return [self._share_made(index) * min(1.0, deepest - index) for index in range(math.ceil(deepest))]

    def _share_made(self, index: int) -> float:
        return self._made[index].value if index < len(self._made) else 1.0

    def _share_true(self, index: int) -> float:
        """Of a depth that was seen seldom it is mostly that of all."""
        if index >= len(self._true_at):
            return self._true.value
        share = self._true_at[index]
        seen = min(share.seen, 1 / _NEW)
        return (seen * share.value + _OF_ALL * self._true.value) / (seen + _OF_ALL)
