"""A request as the scheduler sees it: its tokens, where their keys and values lie, how far the model has read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.row_choice import RowChoice


class Request(ABC):
    """Tokens to be read by the model, and what is done with the logits that it gives for them.

    tokens: the prompt and what was generated so far. blocks: of the KV cache, in order of position. computed: how
    many of the tokens have their keys and values in those blocks. every_logit: logits after each token are wanted,
    not only after the last one. finished: no step may follow.
    """

    def __init__(self, prompt: Sequence[int], *, every_logit: bool) -> None:
        self.tokens = list(prompt)
        self.every_logit = every_logit
        self.blocks: list[int] = []
        self.computed = 0
        self.finished = False

    @abstractmethod
    def receive(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Take the logits [rows, vocabulary] after the tokens from position `start` on; they are overwritten later."""

    @property
    def choice(self) -> RowChoice | None:
        """How its next token can be chosen without it, so that `receive_token` will do; None if it needs the logits."""
        return None

    def receive_token(self, token: int, score: float) -> None:
        """Take the token after the last one, chosen as `choice` says. score: not finite if the logits are unusable."""
        raise NotImplementedError(f"{type(self).__name__} has no choice")

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to read."""
        return len(self.tokens) - self.computed

    def logit_rows(self, count: int) -> int:
        """Rows of logits that a step over the next `count` tokens has to give."""
        if self.every_logit:
            return count
        return 1 if count == self.pending else 0
