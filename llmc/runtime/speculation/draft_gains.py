"""How many tokens drafts bring, by how many are asked for: as seen in the last steps, for the others as these go on."""

from __future__ import annotations

from llmc.runtime.speculation.draft import Draft

# Of an average, what the last request's step weighs at the least.
_NEW = 1 / 32
# As if so many steps had been seen already, in which each draft came true with this probability.
_FIRST_SHARE, _FIRST_STEPS = 0.7, 2
# As how many steps those count that were seen before drafts stopped.
_OLD_STEPS = 8


class _Share:
    """Of how many steps something is true."""

    def __init__(self, first: float) -> None:
        self.value = first
        self.steps = _FIRST_STEPS

    def note(self, is_true: bool) -> None:
        self.steps += 1
        self.value += max(_NEW, 1 / self.steps) * (is_true - self.value)


class DraftGains:
    """Steps of requests that were asked for some number of drafts. Fewer may have been made, or trees of less depth."""

    def __init__(self) -> None:
        # By depth, from the first on: whether a draft of it came true. By number: whether so many were made.
        self._true: list[_Share] = []
        self._made: list[_Share] = []
        # Of trees, by how many drafts were asked for; else each is one deeper.
        self._depths: dict[int, int] = {}

    def note(self, asked: int, draft: Draft, accepted: int) -> None:
        """Of one request in one step."""
        if draft.parents is not None:
            self._depths[asked] = draft.depth
        for index in range(self._depth(asked)):
            if index == len(self._true):
                self._true.append(_Share(self._share_true(index)))
            self._true[index].note(accepted > index)
        made = len(draft)
        for index in range(asked):
            if index == len(self._made):
                self._made.append(_Share(1.0))
            self._made[index].note(made > index)

    def age(self) -> None:
        """Nothing will be seen for a while: let what is seen then count more."""
        for share in (*self._true, *self._made):
            share.steps = min(share.steps, _OLD_STEPS)

    def tokens(self, asked: int) -> float:
        """That a request gets of a step."""
        return 1.0 + sum(self._share_true(index) for index in range(self._depth(asked)))

    def drafts(self, asked: int) -> float:
        """That are made for a request."""
        return sum(self._made[index].value if index < len(self._made) else 1.0 for index in range(asked))

    def _depth(self, asked: int) -> int:
        # As deep as the deepest where so many were never seen.
        return self._depths.get(asked) or min(asked, max(self._depths.values(), default=asked))

    def _share_true(self, index: int) -> float:
        """Deeper than was seen each comes true as often after the one before it as on the whole."""
        if index < len(self._true):
            return self._true[index].value
        if not self._true:
            return _FIRST_SHARE ** (index + 1)
        deepest = self._true[-1].value
        return deepest * float(deepest ** (1 / len(self._true))) ** (index + 1 - len(self._true))
