"""Compare an engine's logits with the original model's: the measure of `llmc verify` and the tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
# Token ids of one sequence → logits [tokens, vocabulary], fp32.
LogitFunction = Callable[[Sequence[int]], Logits]


@dataclass(frozen=True)
class Comparison:
    """How far two models' logits lie apart over the same tokens.

    spread: standard deviation of the reference's logits, the scale that the differences are read against.
    top1_agreement: share of positions with the same argmax. Perplexities: exp of the mean negative log-likelihood
    (natural) of each next token. middle_difference: the largest difference of the token that half of all exceed.
    """

    tokens: int
    max_difference: float
    middle_difference: float
    mean_difference: float
    spread: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    @property
    def relative_difference(self) -> float:
        """The largest difference over the spread."""
        return self.max_difference / self.spread

    @property
    def relative_in_the_middle(self) -> float:
        """The median token's largest difference over the spread."""
        return self.middle_difference / self.spread


def compare(engine: LogitFunction, reference: LogitFunction, sequences: Sequence[Sequence[int]]) -> Comparison:
    """Run both over each sequence (at least two tokens each) and gather the differences, one sequence in memory."""
    (comparison,) = compare_each([engine], reference, sequences)
    return comparison


def compare_each(
    models: Sequence[LogitFunction], reference: LogitFunction, sequences: Sequence[Sequence[int]]
) -> list[Comparison]:
    """Compare each model with the reference, which runs once per sequence for all of them; see `compare`."""
    gathered = [_Differences() for _ in models]
    for tokens in sequences:
        theirs = reference(tokens).astype(np.float64)
        for model, differences in zip(models, gathered, strict=True):
            differences.add(model(tokens).astype(np.float64), theirs, tokens)
    return [differences.comparison() for differences in gathered]


class _Differences:
    """The differences of one model from the reference, accumulated sequence by sequence."""

    def __init__(self) -> None:
        self._count = self._positions = self._same = 0
        self._total = self._value_sum = self._square_sum = 0.0
        self._perplexity, self._reference_perplexity = Perplexity(), Perplexity()
        self._of_tokens: list[npt.NDArray[np.float64]] = []

    def add(self, ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64], tokens: Sequence[int]) -> None:
        difference = np.abs(ours - theirs)
        self._of_tokens.append(difference.max(-1))
        self._total += float(difference.sum())
        self._value_sum += float(theirs.sum())
        self._square_sum += float(np.square(theirs).sum())
        self._count += theirs.size
        self._positions += len(tokens)
        self._same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self._perplexity.add(ours, tokens)
        self._reference_perplexity.add(theirs, tokens)

    def comparison(self) -> Comparison:
        by_token = np.concatenate(self._of_tokens)
        variance = self._square_sum / self._count - (self._value_sum / self._count) ** 2
        return Comparison(
            tokens=self._positions,
            max_difference=float(np.max(by_token)),
            middle_difference=float(np.median(by_token)),
            mean_difference=self._total / self._count,
            spread=float(np.sqrt(variance)),
            top1_agreement=self._same / self._positions,
            perplexity=self._perplexity.value,
            reference_perplexity=self._reference_perplexity.value,
        )


class Perplexity:
    """exp of the mean negative log-likelihood of next tokens, gathered sequence by sequence. tokens: how many."""

    def __init__(self) -> None:
        self.tokens = 0
        self._total = 0.0

    def add(self, logits: Logits | npt.NDArray[np.float64], tokens: Sequence[int]) -> None:
        """Take in one sequence. logits: [tokens, vocabulary]."""
        self._total += negative_log_likelihood(logits.astype(np.float64, copy=False), tokens)
        self.tokens += len(tokens) - 1

    @property
    def value(self) -> float:
        """The difference over everything added until now."""
        return float(np.exp(self._total / self.tokens))


def negative_log_likelihood(logits: npt.NDArray[np.float64], tokens: Sequence[int]) -> float:
    """Sum over positions of -log p(next token), natural. logits: [tokens, vocabulary]."""
    scores = logits[:-1]
    top = scores.max(-1)
    log_sum = np.log(np.exp(scores - top[:, None]).sum(-1)) + top
    chosen = scores[np.arange(len(tokens) - 1), np.asarray(tokens[1:])]
    return float((log_sum - chosen).sum())


def windows(
    tokens: Sequence[int], length: int, limit: int | None = None, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """Cut a text into consecutive windows, each of which a model can read without the others.

    Args:
        tokens: The text's token ids, with or without `prefix` in front.
        length: Tokens of a window, `prefix` included. The last window may be shorter, but has at least two.
        limit: The largest number of windows; None for all.
        prefix: The special tokens that the tokenizer puts before a text. Each window begins with them: a model that
            was trained with a token such as <bos> in front predicts far worse without it.

    Returns:
        The token ids of each window.
    """
    prefix = list(prefix)
    text = tokens[len(prefix) :] if list(tokens[: len(prefix)]) == prefix else tokens
    step = max(1, length - len(prefix))
    pieces = [[*prefix, *text[first : first + step]] for first in range(0, len(text), step)]
    pieces = [piece for piece in pieces if len(piece) >= 2]
    return pieces if limit is None else pieces[:limit]
