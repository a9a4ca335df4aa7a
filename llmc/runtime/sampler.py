"""Choose the next token from a row of logits.

The order of the steps is that of Hugging Face's logits processors: minimum length, penalties, bias, temperature,
top-k, top-p, min-p, then one draw. Presence and frequency penalties are OpenAI's: they count the output only, while
the repetition penalty (Keskar et al. 2019) counts the prompt too.
top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmc.errors import ModelFailureError, RequestError
from llmc.runtime.random_numbers import uniform
from llmc.runtime.row_choice import BEST, EVERY_TOKEN, RowChoice
from llmc.runtime.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
_DRAW_BLOCK = 512


class TokenMask(Protocol):
    """What a grammar allows next."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """By token id: [vocabulary]. Valid until the next call."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        ...


class Sampler:
    """One request's choice of tokens. What it draws depends on its seed and its own logits only.

    forbidden_early: the tokens that may not come before params.min_tokens (end-of-text and stop tokens). choice: which
    of the request's choices this is; each draws from its own stream of the seed. mask: which tokens may come at all.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: TokenIds,
        vocab_size: int,
        forbidden_early: TokenIds,
        *,
        choice: int = 0,
        mask: TokenMask | None = None,
    ) -> None:
        self._params = params
        self._forbidden_early = forbidden_early
        sequence = np.random.SeedSequence(params.seed, spawn_key=(choice,) if choice else ())
        self._seed = int(sequence.generate_state(1).view(np.int32)[0])
        self._is_random = params.temperature > 0
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._mask = mask
        self._changes = params.changes_logits() or mask is not None
        self._counts_tokens = params.changes_logits()
        # Whether the token is always the one with the largest logit.
        self.is_argmax = not self._is_random and not self._changes
        if self._counts_tokens:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[prompt] = True
            self._counts = np.zeros(vocab_size, np.int32)
        self._generated = 0

    def sample(self, logits: Row) -> int:
        """The next token for a row of logits: [vocabulary], fp32, left unchanged. Raises ModelFailureError for NaN."""
        scores = self.adjusted(logits) if self._changes else logits
        best = int(scores.argmax())
        check_finite(best, float(scores[best]))
        token = best
        if self._is_random:
            token = _draw(scores, best, self._params, uniform(self._seed, self._generated))
        self._generated += 1
        if self._counts_tokens:
            self._seen[token] = True
            self._counts[token] += 1
        if self._mask is not None:
            self._mask.accept(token)
        return token

    def choice(self) -> RowChoice | None:
        """How the executor can choose the next token from the same distribution; None if only `sample` can.

        The CPU's kernel draws what `sample` does, but for a rounding of one in a million; a GPU's draws are other
        ones, and as repeatable.
        """
        params = self._params
        if self._changes:
            return None
        if not self._is_random:
            return BEST
        top_k = EVERY_TOKEN if params.top_k is None else min(params.top_k, EVERY_TOKEN - 1)
        return RowChoice(params.temperature, top_k, params.top_p, params.min_p, self._seed, self._generated)

    def count(self) -> None:
        """A token was chosen as `choice` says."""
        self._generated += 1

    @property
    def has_mask(self) -> bool:
        """Whether `is_complete` may come true."""
        return self._mask is not None

    @property
    def is_complete(self) -> bool:
        """Whether the mask lets nothing follow."""
        return self._mask is not None and self._mask.is_complete

    def adjusted(self, logits: Row) -> Row:
        """A copy of the logits after minimum length, penalties, bias and mask."""
        params = self._params
        scores = logits.copy()
        if self._generated < params.min_tokens:
            scores[self._forbidden_early] = -np.inf
        if params.repetition_penalty != 1.0:
            penalize_repetition(scores, np.flatnonzero(self._seen), params)
        if params.presence_penalty or params.frequency_penalty:
            ids = np.flatnonzero(self._counts)
            penalize_output(scores, ids, self._counts[ids], params)
        scores[self._bias_ids] += self._bias
        if self._mask is not None:
            scores[~self._mask.allowed()] = -np.inf
        return scores


def penalize_repetition(scores: Row, seen: TokenIds, params: SamplingParams) -> None:
    """In place. seen: the ids of the prompt and the output, each once."""
    values = scores[seen]
    penalty = np.float32(params.repetition_penalty)
    scores[seen] = np.where(values < 0, values * penalty, values / penalty)


def penalize_output(scores: Row, ids: TokenIds, counts: npt.NDArray[np.integer], params: SamplingParams) -> None:
    """In place. ids: of the output, each once; counts: how often each is there."""
    scores[ids] -= np.float32(params.presence_penalty)
    scores[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)


def choose(samplers: Sequence[Sampler], logits: Logits, rows: Sequence[int]) -> Sequence[int | RequestError]:
    """Each sampler's token for its row of logits, or why there is none. `rows` ascend."""
    if not samplers:
        return ()
    if rows[-1] == len(rows) - 1 and all(sampler.is_argmax for sampler in samplers):
        best = logits[: len(rows)].argmax(axis=1)
        return _checked(best, logits[rows, best])
    return [_sampled(sampler, logits[row]) for sampler, row in zip(samplers, rows, strict=True)]


def _sampled(sampler: Sampler, logits: Row) -> int | RequestError:
    try:
        return sampler.sample(logits)
    except RequestError as error:
        return error


def _checked(tokens: TokenIds, logits: Row) -> Sequence[int | RequestError]:
    found: list[int | RequestError] = tokens.tolist()
    for index in np.flatnonzero(~np.isfinite(logits)):
        found[index] = _failure(int(tokens[index]), float(logits[index]))
    return found


def check_finite(token: int, logit: float) -> None:
    """Raise ModelFailureError if the largest logit is no number."""
    if not math.isfinite(logit):
        raise _failure(token, logit)


def _failure(token: int, logit: float) -> ModelFailureError:
    return ModelFailureError(
        f"the model gave no usable logits: the largest is {logit} at token id {token}",
        fix="the weights or activations overflow: build with dtype=float32, and check the model itself",
    )


def _draw(scores: Row, best: int, params: SamplingParams, number: float) -> int:
    """One token for a number in [0, 1), by inverting the cumulative sum.

    In two levels: summing blocks is several times faster than summing up all.
    """
    ids, weights = candidates(scores, best, params)
    whole = len(weights) // _DRAW_BLOCK * _DRAW_BLOCK
    sums = weights[:whole].reshape(-1, _DRAW_BLOCK).sum(axis=1)
    upto = np.cumsum(np.append(sums, weights[whole:].sum()), dtype=np.float64)
    point = number * upto[-1]
    block = min(int(np.searchsorted(upto, point, side="right")), len(upto) - 1)
    if block * _DRAW_BLOCK == len(weights):  # The rest is empty.
        block -= 1
    start = block * _DRAW_BLOCK
    inside = np.cumsum(weights[start : start + _DRAW_BLOCK], dtype=np.float64)
    below = upto[block - 1] if block else 0.0
    index = start + min(int(np.searchsorted(inside, point - below, side="right")), len(inside) - 1)
    while not weights[index]:  # Rounding may lead past the last token that can come.
        index -= 1
    return index if ids is None else int(ids[index])


def candidates(scores: Row, best: int, params: SamplingParams) -> tuple[TokenIds | None, Weights]:
    """The tokens that survive temperature, top-k, top-p and min-p, in order of id, and their relative probabilities.

    scores: [vocabulary], whose largest is at `best`. The ids are None when every token survives.
    """
    ids: TokenIds | None = None
    kept = scores
    if params.top_k is not None and params.top_k < len(scores):
        threshold = np.partition(scores, len(scores) - params.top_k)[len(scores) - params.top_k]
        ids = np.flatnonzero(scores >= threshold)
        kept = scores[ids]
    # Bounded, so that equal logits do not make 0 · inf.
    weights: Weights = np.exp((kept - scores[best]) * np.float32(min(1.0 / params.temperature, 1e30)))
    if params.top_p < 1.0:
        ids, weights = _taken(ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        ids, weights = _taken(ids, weights, np.flatnonzero(weights >= np.float32(params.min_p)))
    return ids, weights


def _nucleus(weights: Weights, top_p: float) -> TokenIds:
    """The places that stay when the least likely are dropped as long as those sum to at most 1 - top_p.

    A token below (1 - top_p) / n is always dropped, since all of its kind together weigh less than 1 - top_p: that
    leaves few to sort. Ties at the boundary stay.
    """
    total = float(weights.sum(dtype=np.float64))
    budget = (1.0 - top_p) * total
    likely = np.flatnonzero(weights > budget / len(weights))
    if not len(likely):
        return np.flatnonzero(weights == weights.max())
    values = weights[likely]
    ascending = np.sort(values)
    upto = np.cumsum(ascending, dtype=np.float64)
    unlikely = total - float(upto[-1])
    dropped = int(np.searchsorted(upto, budget - unlikely, side="right"))
    kept: TokenIds = likely[values >= ascending[min(dropped, len(ascending) - 1)]]
    return kept


def _taken(ids: TokenIds | None, weights: Weights, places: TokenIds) -> tuple[TokenIds, Weights]:
    return (places if ids is None else ids[places]), weights[places]
