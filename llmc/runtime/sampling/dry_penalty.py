"""DRY: a penalty for the token that would go on repeating what was written before.

If the last m tokens occur earlier in the text, the token that followed them there loses

    multiplier · base ** (m - allowed_length)        for m ≥ allowed_length

of its logit. No match goes across a breaker (a token such as a line's end), and none continues into one. Source: p-e-w,
"DRY: A modern repetition penalty that reliably prevents looping", text-generation-webui pull request 5677, 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.written_tokens import Written
from llmc.runtime.text.tokenizer import Tokenizer

# A match is measured up to allowed_length plus this: 1.75**50 is more than any logit, and a text of one token repeated
# would take time that grows with its square.
LONGEST_EXCESS = 50
_LARGEST_PENALTY = 1e30


@dataclass(frozen=True)
class DryPenalty:
    """The penalty with one request's parameters. breakers: Token ids. last_n: The number of last tokens that are
    searched; None for all."""

    multiplier: float
    base: float
    allowed_length: int
    breakers: frozenset[int]
    last_n: int | None

    def __call__(self, scores: npt.NDArray[np.float32], written: Written) -> npt.NDArray[np.float32]:
        """Subtract the penalties from `scores`, [vocabulary], in place. Returns `scores`."""
        ids = written.ids if self.last_n is None else written.ids[max(0, len(written.ids) - self.last_n) :]
        if len(ids) < 2 or int(ids[-1]) in self.breakers:
            return scores
        ends = np.flatnonzero(ids[:-1] == ids[-1])
        ends = ends[[int(token) not in self.breakers for token in ids[ends + 1]]]
        lengths = self._match_lengths(ids, ends)
        is_long = lengths >= self.allowed_length
        tokens, places = np.unique(ids[ends[is_long] + 1], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, places, lengths[is_long])
        penalties = np.minimum(self.multiplier * self.base ** (longest - self.allowed_length), _LARGEST_PENALTY)
        scores[tokens] -= penalties.astype(np.float32)
        return scores

    def _match_lengths(self, ids: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of tokens before each of `ends` that equal those before the last token."""
        lengths = np.ones(len(ends), np.int64)
        growing = np.arange(len(ends))
        for length in range(1, min(len(ids), self.allowed_length + LONGEST_EXCESS)):
            wanted = ids[-1 - length]
            growing = growing[ends[growing] >= length]
            growing = growing[ids[ends[growing] - length] == wanted]
            if not len(growing) or int(wanted) in self.breakers:
                break
            lengths[growing] += 1
        return lengths


def breaker_tokens(breakers: Sequence[str], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens whose text contains one of these; for a breaker that no token contains, the last one that spells it.

    Raises RequestError without a tokenizer.
    """
    if breakers and not tokenizer.exists:
        raise RequestError(
            "DRY's sequence breakers are texts, and the engine has no tokenizer",
            at="dry_sequence_breakers",
            fix="set dry_sequence_breakers=(), or rebuild from a model directory with a tokenizer.json",
        )
    tokens: set[int] = set()
    for text in breakers:
        # After a letter, so that a tokenizer that puts a space before every text puts it there.
        tokens |= tokenizer.tokens_containing(text) or set(tokenizer.encode("a" + text, add_special_tokens=False)[-1:])
    return frozenset(tokens)
