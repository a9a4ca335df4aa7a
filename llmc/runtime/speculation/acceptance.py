"""Methods other than the invariant one to accept drafts, for requests that draw at random.

Rejection (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", and Chen et al. 2023): a
draft is accepted with probability min(1, p / q), where p and q are its probabilities by the model and the drafter;
otherwise a token is drawn from max(0, p - q). Tokens then have the distribution p for any q, and more drafts are
accepted.

Typical (Cai et al. 2024, "Medusa"): a draft is accepted if p is more than min(threshold, alpha · exp(-entropy of p)).
Tokens then have another distribution than p: it is lossy.

Random numbers depend on the request's seed and its count of tokens, and differ from those that draw tokens. But load
decides which tokens have drafts, and so which of the two a token is drawn by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.requests.boundary import attempt, attempts
from llmc.runtime.sampling.gumbel_noise import uniform_pairs
from llmc.runtime.sampling.sampler import Row, Sampler

Probabilities = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]


class Judged(NamedTuple):
    """A row of logits of a request, the draft for it, and the distribution that the draft was drawn from: [vocabulary],
    with sum 1; None for a draft that was certain."""

    sampler: Sampler
    logits: Row
    draft: int
    drawn_from: Probabilities | None


class Acceptance(Protocol):
    """A method to accept drafts."""

    @property
    def name(self) -> str:
        """The method's name in rejection_sample_method."""

    def tokens(self, judged: Sequence[Judged]) -> list[int | RequestError]:
        """Return for each row the draft, another token, or an error; the samplers have accepted the token."""


@dataclass(frozen=True)
class Rejection:
    """Exact in distribution."""

    name: ClassVar[str] = "rejection"

    def tokens(self, judged: Sequence[Judged]) -> list[int | RequestError]:
        """Accept with min(1, p / q), or draw from max(0, p - q)."""

        def decide(rows: Sequence[_Prepared], p: Probabilities) -> Tokens:
            drafts = np.array([row.draft for row in rows])
            seeds, counters = (np.array(column) for column in zip(*(row.place for row in rows), strict=True))
            return kept_or_redrawn(p, _drawn_from(rows, p.shape[1]), drafts, uniform_pairs(seeds, counters))

        return _decided(judged, decide)


@dataclass(frozen=True)
class Typical:
    """Accepts drafts that are likely enough for the entropy of their row (Medusa). Lossy: it changes the
    distribution."""

    threshold: float
    alpha: float
    name: ClassVar[str] = "typical"

    def tokens(self, judged: Sequence[Judged]) -> list[int | RequestError]:
        """The draft if it is likely enough, otherwise the token that is drawn without drafts."""

        def decide(rows: Sequence[_Prepared], p: Probabilities) -> Tokens:
            drafts, drawn = (np.array(column) for column in zip(*((row.draft, row.drawn) for row in rows), strict=True))
            return np.where(is_typical(p, drafts, self.threshold, self.alpha), drafts, drawn)

        return _decided(judged, decide, draws=True)


def kept_or_redrawn(p: Probabilities, q: Probabilities, drafts: Tokens, uniforms: Probabilities) -> Tokens:
    """Return for each row the draft, or a token drawn from max(0, p - q) instead: [rows].

    p, q: [rows, vocabulary], each row with sum 1. drafts: [rows], drawn from q. uniforms: [rows, 2], in (0, 1).
    """
    rows = np.arange(len(drafts))
    tokens = drafts.copy()
    lost = np.flatnonzero(uniforms[:, 0] * q[rows, drafts] >= p[rows, drafts])
    left = np.maximum(p[lost] - q[lost], 0.0)
    # If nothing is left, only rounding has refused the draft.
    left = np.where(left.any(axis=1, keepdims=True), left, p[lost])
    upto = left.cumsum(axis=1)
    tokens[lost] = (upto <= uniforms[lost, 1:] * upto[:, -1:]).sum(axis=1)
    return tokens


def is_typical(p: Probabilities, drafts: Tokens, threshold: float, alpha: float) -> npt.NDArray[np.bool_]:
    """Whether each row's draft is likely enough for its entropy: [rows]. p: [rows, vocabulary]."""
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
    likely: npt.NDArray[np.bool_] = p[np.arange(len(drafts)), drafts] > np.minimum(threshold, alpha * np.exp(-entropy))
    return likely


class _Prepared(NamedTuple):
    """The data for judging a row: the target's distribution, and the token that would be drawn without a draft, if
    needed; the draft and its distribution; and the key of the row's random numbers."""

    probabilities: Probabilities
    drawn: int | None
    draft: int
    drawn_from: Probabilities | None
    place: tuple[int, int]


def _prepared(row: Judged, draws: bool) -> _Prepared:
    sampler = row.sampler
    scores, best = sampler.scores(row.logits)
    drawn = sampler.guess(scores, 0) if draws else None
    return _Prepared(sampler.probabilities(scores, best), drawn, row.draft, row.drawn_from, sampler.place)


def _decided(
    judged: Sequence[Judged], decide: Callable[[Sequence[_Prepared], Probabilities], Tokens], *, draws: bool = False
) -> list[int | RequestError]:
    """Decide for all rows with finite logits together. draws: whether `decide` uses the token that would be drawn."""
    prepared = attempts(_prepared, [(row, draws) for row in judged])
    decisions: list[int | RequestError] = [
        outcome if isinstance(outcome, RequestError) else outcome.draft for outcome in prepared
    ]
    usable = [(index, outcome) for index, outcome in enumerate(prepared) if isinstance(outcome, _Prepared)]
    if usable:
        indices, rows = zip(*usable, strict=True)
        tokens = decide(rows, np.stack([row.probabilities for row in rows])).tolist()
        for index, token in zip(indices, tokens, strict=True):
            decisions[index] = attempt(judged[index].sampler.accept, token) or token
    return decisions


def _drawn_from(rows: Sequence[_Prepared], vocabulary: int) -> Probabilities:
    q = np.zeros((len(rows), vocabulary))
    for own, row in zip(q, rows, strict=True):
        if row.drawn_from is None:
            own[row.draft] = 1.0
        else:
            own[:] = row.drawn_from
    return q
