"""The answer of a plain reference of a policy that keeps rows by score."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

# The rows that a cut keeps, for each layer and KV head: their numbers before the cut, in their order after it.
Kept = list[list[list[int]]]


class ReferenceAnswer(NamedTuple):
    """What an engine has to say, and to keep.

    tokens: those that follow the prompt. logprobs: the log-probability of each. kept: the rows that each cut keeps.
    """

    tokens: list[int]
    logprobs: list[float]
    kept: list[Kept]

    def add(self, token: int, logits: Tensor) -> None:
        """Add a token to the answer. logits: [vocabulary], of its place."""
        self.tokens.append(token)
        self.logprobs.append(float(logits.log_softmax(-1)[token]))


def keep_rows(cache: Any, best: Tensor) -> None:
    """Leave these rows in one layer's cache of transformers. best: [kv_heads, rows]."""
    for name in ("keys", "values"):
        rows = getattr(cache, name)
        setattr(cache, name, rows.gather(2, best[None, :, :, None].expand(*rows.shape[:2], -1, rows.shape[3])))
