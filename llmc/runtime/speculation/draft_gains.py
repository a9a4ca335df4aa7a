"""How many tokens drafts bring, by how many are asked for: as seen in the last steps, for the others as these go on."""

from __future__ import annotations

from llmc.runtime.speculation.draft import Draft

# Of an average, what the last value weighs at the least.
_NEW = 1 / 32
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
        self._depths: dict[int, int] = {}

    def note(self, asked: int, draft: Draft, accepted: int) -> None:
        """Of one request in one step."""
        depth, made = draft.depth, len(draft)
        if draft.parents is not None:
            self._depths[asked] = depth
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
        for index in range(self._depth(asked)):
            path *= self._share_true(index)
            found += path * self._share_made(index)
        return found

    def drafts(self, asked: int) -> float:
        """That are made for a request."""
        return sum(self._share_made(index) for index in range(asked))

    def _depth(self, asked: int) -> int:
        # As deep as the deepest where so many were never seen.
        return self._depths.get(asked) or min(asked, max(self._depths.values(), default=asked))

    def _share_made(self, index: int) -> float:
        return self._made[index].value if index < len(self._made) else 1.0

    def _share_true(self, index: int) -> float:
        """Of a depth that was seen seldom it is mostly that of all."""
        if index >= len(self._true_at):
            return self._true.value
        share = self._true_at[index]
        seen = min(share.seen, 1 / _NEW)
        return (seen * share.value + _OF_ALL * self._true.value) / (seen + _OF_ALL)
