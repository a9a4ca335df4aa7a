"""A read-only view of a sequence: the tokens of its prompt and of its output until now."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Written:
    """The tokens of a request, as an array. ids: the ids of the prompt and the output, [tokens]; valid until the next
    token is appended. prompt_tokens: how many of them are the prompt's."""

    ids: TokenIds
    prompt_tokens: int

    @property
    def output(self) -> TokenIds:
        """The generated tokens."""
        return self.ids[self.prompt_tokens :]


class GrowingTokens:
    """Tokens in one array that has room for more: a list would be copied for every look."""

    def __init__(self, prompt: TokenIds) -> None:
        self._ids = np.empty(len(prompt) + 64, np.int64)
        self._ids[: len(prompt)] = prompt
        self._count = self._prompt_tokens = len(prompt)

    def append(self, token: int) -> None:
        """Append a token of the output."""
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._count] = token
        self._count += 1

    def written(self) -> Written:
        """A view of the current tokens."""
        return Written(self._ids[: self._count], self._prompt_tokens)
