"""A request as the scheduler sees it: its tokens, where their keys and values lie, how far the model has read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
    def greedy(self) -> bool:
        """Whether `receive_best` will do: the request wants the likeliest token and nothing else of its logits."""
        return False

    def receive_best(self, token: int, logit: float) -> None:
        """Take the likeliest token after the last one, and its logit. Only for a request that is greedy."""
        raise NotImplementedError(f"{type(self).__name__} is not greedy")

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to read."""
        return len(self.tokens) - self.computed

    def logit_rows(self, count: int) -> int:
        """Rows of logits that a step over the next `count` tokens has to give."""
        if self.every_logit:
            return count
        return 1 if count == self.pending else 0
