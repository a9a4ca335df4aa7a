"""Choose the next token from a row of logits.

The order of the steps is that of Hugging Face's logits processors: minimum length, penalties, bias, temperature,
top-k, top-p, min-p, then one draw. Presence and frequency penalties are OpenAI's: they count the output only, while
the repetition penalty (Keskar et al. 2019) counts the prompt too.
top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.row_choice import EVERY_TOKEN, RowChoice
from llmc.runtime.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


class Sampler:
    """One request's choice of tokens. What it draws depends on its seed and its own logits only.

    forbidden_early: the tokens that may not come before params.min_tokens (end-of-text and stop tokens).
    """

    def __init__(self, params: SamplingParams, prompt: TokenIds, vocab_size: int, forbidden_early: TokenIds) -> None:
        self._params = params
        self._forbidden_early = forbidden_early
        self._generator = None if params.temperature == 0 else np.random.Generator(np.random.PCG64(params.seed))
        self._device_seed = int(np.random.SeedSequence(params.seed).generate_state(1).view(np.int32)[0])
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._changes = params.changes_logits()
        if self._changes:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[prompt] = True
            self._counts = np.zeros(vocab_size, np.int32)
        self._generated = 0

    def sample(self, logits: Row) -> int:
        """The next token for a row of logits: [vocabulary], fp32, left unchanged. Raises RequestError for NaN."""
        scores = self.adjusted(logits) if self._changes else logits
        best = int(scores.argmax())
        _check_finite(best, float(scores[best]))
        token = best if self._generator is None else self._draw(scores, best, self._generator)
        self._generated += 1
        if self._changes:
            self._seen[token] = True
            self._counts[token] += 1
        return token

    def choice(self) -> RowChoice | None:
        """How a device can choose the next token from the same distribution; None if only `sample` can.

        Its draws are other ones than those of `sample`, and as repeatable.
        """
        params = self._params
        if self._changes:
            return None
        top_k = EVERY_TOKEN if params.top_k is None else min(params.top_k, EVERY_TOKEN - 1)
        return RowChoice(params.temperature, top_k, params.top_p, params.min_p, self._device_seed, self._generated)

    def accept(self, token: int, score: float) -> int:
        """The token that was chosen as `choice` says. score: of the choice; RequestError if it is not finite."""
        _check_finite(token, score)
        self._generated += 1
        return token

    def adjusted(self, logits: Row) -> Row:
        """A copy of the logits after minimum length, penalties and bias."""
        params = self._params
        scores = logits.copy()
        if self._generated < params.min_tokens:
            scores[self._forbidden_early] = -np.inf
        if params.repetition_penalty != 1.0:
            ids = np.flatnonzero(self._seen)
            seen = scores[ids]
            penalty = np.float32(params.repetition_penalty)
            scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids = np.flatnonzero(self._counts)
            scores[ids] -= np.float32(params.presence_penalty)
            scores[ids] -= np.float32(params.frequency_penalty) * self._counts[ids].astype(np.float32)
        scores[self._bias_ids] += self._bias
        return scores

    def _draw(self, scores: Row, best: int, generator: np.random.Generator) -> int:
        ids, weights = candidates(scores, best, self._params)
        cumulative = np.cumsum(weights)
        index = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
        chosen = min(index, len(weights) - 1)
        return chosen if ids is None else int(ids[chosen])


def _check_finite(token: int, logit: float) -> None:
    if not math.isfinite(logit):
        raise RequestError(
            f"the model gave no usable logits: the largest is {logit} at token id {token}",
            fix="the weights or activations overflow: build with dtype=float32, and check the model itself",
        )


def candidates(scores: Row, best: int, params: SamplingParams) -> tuple[TokenIds | None, npt.NDArray[np.float64]]:
    """The tokens that survive temperature, top-k, top-p and min-p, in order of id, and their relative probabilities.

    scores: [vocabulary], whose largest is at `best`. The ids are None when every token survives.
    """
    ids: TokenIds | None = None
    kept = scores
    if params.top_k is not None and params.top_k < len(scores):
        threshold = np.partition(scores, len(scores) - params.top_k)[len(scores) - params.top_k]
        ids = np.flatnonzero(scores >= threshold)
        kept = scores[ids]
    weights = np.exp((kept.astype(np.float64) - float(scores[best])) / params.temperature)
    if params.top_p < 1.0:
        ids, weights = _filtered(ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        ids, weights = _filtered(ids, weights, weights >= params.min_p)
    return ids, weights


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Drop the least likely tokens as long as what is dropped sums to at most 1 - top_p; the likeliest stays.

    A token below (1 - top_p) / n is always dropped, since all of its kind together weigh less than 1 - top_p: that
    leaves few to sort.
    """
    budget = (1.0 - top_p) * float(weights.sum())
    likely = weights > budget / len(weights)
    dropped = float(weights[~likely].sum())
    ids = np.flatnonzero(likely)
    ascending = ids[np.argsort(weights[ids], kind="stable")]
    below = dropped + np.cumsum(weights[ascending]) <= budget
    below[-1:] = False
    likely[ascending[below]] = False
    return likely


def _filtered(
    ids: TokenIds | None, weights: npt.NDArray[np.float64], keep: npt.NDArray[np.bool_]
) -> tuple[TokenIds, npt.NDArray[np.float64]]:
    return (np.flatnonzero(keep) if ids is None else ids[keep]), weights[keep]
