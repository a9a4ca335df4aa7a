"""Tokens that may follow a request's: a chain, or a tree of which one path may come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for one request and one step.

    parents: for each token the index of the one that it follows, which stands before it, or None where it follows the
    request's last token; None as a whole for a chain, in which each token follows the one before it.
    """

    tokens: Sequence[int]
    parents: Sequence[int | None] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft(())
