"""Choose the next token from a row of logits.

The order of the steps is that of Hugging Face's logits processors: penalties, bias, edits (see logit_edits), minimum
length, grammar, temperature and filters (see token_filters), then one draw. Presence and frequency penalties are
OpenAI's: they count the output only, while the repetition penalty (Keskar et al. 2019) counts the prompt too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.requests.boundary import attempt, attempts
from llmc.runtime.sampling.gumbel_noise import largest_sum, largest_sums
from llmc.runtime.sampling.logit_edits import LogitEdit, edited
from llmc.runtime.sampling.row_choice import BEST, EVERY_TOKEN, RowChoice, RowChoices
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.token_filters import candidates, per_temperature
from llmc.runtime.sampling.unusable_logits import check_finite, unusable_logits
from llmc.runtime.sampling.written_tokens import GrowingTokens, TokenIds

Row = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]


# Tokens of rows of scores: [rows, vocabulary] -> [rows].
DrawRows = Callable[[Logits, RowChoices], npt.NDArray[np.int32]]


class TokenMask(Protocol):
    """The tokens that a grammar allows next."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token id whether it may come next: [vocabulary]. Valid until the next call."""

    def accept(self, token: int) -> None:
        """Advance the grammar by the chosen token."""

    def allowed_after(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """Return the tokens allowed after these, as `allowed`; None if these are not allowed or nothing may follow."""

    def count_acceptable(self, tokens: Sequence[int]) -> int:
        """The number of these tokens, from the first on, that are allowed consecutively."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""

    @property
    def is_accepting(self) -> bool:
        """Whether the chosen tokens may be the whole output."""


class Sampler:
    """The token choice of one request. Draws depend on its seed and its own logits only.

    forbidden_early: tokens that are not allowed before params.min_tokens (end-of-text and stop tokens). choice: index
    among the request's choices; each draws from its own stream of the seed. mask: the allowed tokens. edits: further
    edits of the logits by the tokens before them. dtype: the engine's dtype, for errors about logits that are not
    numbers. is_random: whether it draws instead of taking the largest.
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
        edits: Sequence[LogitEdit] = (),
        dtype: str = "float32",
    ) -> None:
        self.dtype = dtype
        self._params = params
        self._forbidden_early = forbidden_early
        self.is_random = params.temperature > 0
        self._seed = _seed(params.seed, choice) if self.is_random else 0
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._mask = mask
        self._edits = edits
        self._written = GrowingTokens(prompt) if edits else None
        self._changes = bool(params.changes_logits() or mask is not None or edits)
        self._counts_tokens = params.changes_logits()
        # Whether the token is always the one with the largest logit.
        self.is_argmax = not self.is_random and not self._changes
        if self._counts_tokens:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[prompt] = True
            self._counts = np.zeros(vocab_size, np.int32)
        self._generated = 0

    def sample(self, logits: Row) -> int:
        """The next token for a row of logits: [vocabulary], fp32, left unchanged.

        Raises ModelFailureError for logits that are not numbers, RequestError if the parameters allow no token.
        """
        scores, best = self.scores(logits)
        token = _draw(scores, best, self._params, self._seed, self._generated) if self.is_random else best
        self.accept(token)
        return token

    def scores(self, logits: Row) -> tuple[Row, int]:
        """The scores to draw from, which are the logits or a changed copy, and the index of the largest. Raises as
        `sample` does."""
        scores = self.adjusted(logits) if self._changes else logits
        best = int(scores.argmax())
        if scores[best] == -np.inf and np.isfinite(logits.max()):
            raise nothing_allowed(self._params)
        check_finite(best, float(scores[best]), self.dtype)
        return scores, best

    def probabilities(self, scores: Row, best: int) -> npt.NDArray[np.float64]:
        """The distribution that `sample` draws from, given the result of `scores` or `scores_ahead`: [vocabulary],
        after all filters."""
        ids, weights = candidates(scores, best, self._params)
        probabilities = np.zeros(len(scores))
        probabilities[slice(None) if ids is None else ids] = weights
        probabilities /= probabilities.sum()
        return probabilities

    @property
    def place(self) -> tuple[int, int]:
        """The key of the next token's random numbers: the seed and the number of tokens before it."""
        return self._seed, self._generated

    def accept(self, token: int) -> None:
        """The token was drawn from `scores`."""
        self._generated += 1
        if self._counts_tokens:
            self._seen[token] = True
            self._counts[token] += 1
        if self._written is not None:
            self._written.append(token)
        if self._mask is not None:
            self._mask.accept(token)

    def choice(self) -> RowChoice | None:
        """Return how the executor can choose the next token from the logits; None if only `sample` can.

        It draws what `sample` does, a GPU up to the rounding of logits.
        """
        return None if self._changes else self.choice_of_scores()

    def choice_of_scores(self) -> RowChoice | None:
        """Return how a kernel can choose the next token from `scores`; None if only `sample` can."""
        params = self._params
        if not self.is_random:
            return BEST
        if params.typical_p < 1.0:
            return None
        top_k = EVERY_TOKEN if params.top_k is None else min(params.top_k, EVERY_TOKEN - 1)
        return RowChoice(params.temperature, top_k, params.top_p, params.min_p, self._seed, self._generated)

    def choice_ahead(self, count: int) -> RowChoice | None:
        """Return how the executor can guess the token after the next `count`; None if only `scores_ahead` can."""
        choice = None if self._counts_tokens or self._mask is not None else self.choice_of_scores()
        return None if choice is None else choice.later(count)

    def scores_ahead(self, logits: Row, tokens: Sequence[int]) -> Row:
        """The scores to guess from if these tokens come next: the logits, or a copy with penalties, bias and mask.
        Edits are left out, because they may be slow functions of the user."""
        if not (self._counts_tokens or self._mask is not None):
            return logits
        scores = logits.copy()
        if self._counts_tokens:
            self._penalize(scores, tokens)
        if self._generated + len(tokens) < self._params.min_tokens:
            scores[self._forbidden_early] = -np.inf
        if self._mask is not None:
            allowed = self._mask.allowed_after(tokens)
            if allowed is not None:
                scores[~allowed] = -np.inf
        return scores

    def guess(self, scores: Row, count: int) -> int:
        """The token after the next `count`, from the result of `scores_ahead`."""
        best = int(scores.argmax())
        is_drawn = self.is_random and np.isfinite(scores[best])
        return _draw(scores, best, self._params, self._seed, self._generated + count) if is_drawn else best

    def likely(self, scores: Row, count: int, most: int) -> tuple[TokenIds, npt.NDArray[np.float64]]:
        """The `most` tokens that are likeliest to be the one after the next `count`, the likeliest first, and how
        likely each is, if the scores, which `scores_ahead` gave, are only nearly those that will be drawn from."""
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            return np.zeros(0, np.int64), np.zeros(0)
        if self.is_random:
            scaled = _scaled(scores, best, self._params)
            ids, sums = largest_sums(scaled, self._seed, self._generated + count, most)
            # Rounding differences are comparable to the noise of draws.
            weights = np.exp(sums - sums[0])
            return ids, weights / weights.sum()
        ids = np.argpartition(-scores, most)[:most] if most < len(scores) else np.arange(len(scores))
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        weights = np.exp((scores[ids] - scores[best]).astype(np.float64))
        return ids, weights / np.exp(scores - scores[best]).sum(dtype=np.float64)

    def count(self) -> None:
        """A token was chosen as `choice` says."""
        self._generated += 1

    def count_acceptable(self, tokens: Sequence[int]) -> int:
        """The number of these tokens, from the first on, that the mask allows consecutively."""
        return len(tokens) if self._mask is None else self._mask.count_acceptable(tokens)

    @property
    def has_mask(self) -> bool:
        """Whether `is_complete` can become true."""
        return self._mask is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow: the mask lets nothing, or only what may not come before min_tokens."""
        mask = self._mask
        if mask is None:
            return False
        if mask.is_complete:
            return True
        if self._generated >= self._params.min_tokens or not mask.is_accepting:
            return False
        allowed = mask.allowed()
        allowed[self._forbidden_early] = False
        return not allowed.any()

    def adjusted(self, logits: Row) -> Row:
        """A copy of the logits after penalties, bias, edits, minimum length and mask. Raises RequestError."""
        scores = logits.copy()
        if self._counts_tokens:
            self._penalize(scores, ())
        if self._written is not None:
            best = int(logits.argmax())
            check_finite(best, float(logits[best]), self.dtype)
            scores = edited(scores, self._edits, self._written.written())
        if self._generated < self._params.min_tokens:
            scores[self._forbidden_early] = -np.inf
        if self._mask is not None:
            scores[~self._mask.allowed()] = -np.inf
        return scores

    def _penalize(self, scores: Row, ahead: Sequence[int]) -> None:
        """Penalties and bias, in place. ahead: tokens that count as if they had been chosen."""
        params, seen, counts = self._params, self._seen, self._counts
        if ahead:
            seen, counts = seen.copy(), counts.copy()
            seen[list(ahead)] = True
            np.add.at(counts, list(ahead), 1)
        if params.repetition_penalty != 1.0:
            penalize_repetition(scores, np.flatnonzero(seen), params)
        if params.presence_penalty or params.frequency_penalty:
            ids = np.flatnonzero(counts)
            penalize_output(scores, ids, counts[ids], params)
        scores[self._bias_ids] += self._bias


def penalize_repetition(scores: Row, seen: TokenIds, params: SamplingParams) -> None:
    """Apply the repetition penalty in place. seen: Distinct ids of the prompt and the output."""
    values = scores[seen]
    penalty = np.float32(params.repetition_penalty)
    scores[seen] = np.where(values < 0, values * penalty, values / penalty)


def penalize_output(scores: Row, ids: TokenIds, counts: npt.NDArray[np.integer], params: SamplingParams) -> None:
    """Subtract the penalties of output tokens in place. ids: each once; counts: number of times that each occurs."""
    scores[ids] -= np.float32(params.presence_penalty)
    scores[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)


def choose(
    samplers: Sequence[Sampler], logits: Iterable[Row], draw: DrawRows | None = None
) -> Sequence[int | RequestError]:
    """Return each sampler's token for its row of logits, or the reason for none. draw: a kernel that draws as samplers
    do."""
    rows = zip(samplers, logits, strict=True)
    if draw is None:
        return attempts(Sampler.sample, rows)
    outcomes = attempts(_sampled_or_scored, rows)
    scored = [(index, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, _Scored)]
    if scored:
        scores, choices = np.stack([entry.scores for _, entry in scored]), [entry.choice for _, entry in scored]
        for (index, _), token in zip(scored, draw(scores, RowChoices.of(choices)).tolist(), strict=True):
            outcomes[index] = attempt(samplers[index].accept, token) or token
    return [outcome for outcome in outcomes if not isinstance(outcome, _Scored)]


def choose_largest(samplers: Sequence[Sampler], logits: Logits, rows: Sequence[int]) -> Sequence[int | RequestError]:
    """Return the token with the largest logit of each row, or the reason for none. rows: numbers of rows of the logits,
    ascending."""
    if rows[-1] != len(rows) - 1:
        logits = logits[list(rows)]
    best = logits[: len(rows)].argmax(axis=1)
    return _checked(best, logits[range(len(rows)), best], samplers[0].dtype)


class _Scored(NamedTuple):
    """The scores that a kernel draws from."""

    scores: Row
    choice: RowChoice


def _sampled_or_scored(sampler: Sampler, logits: Row) -> int | _Scored:
    """The next token where only the sampler can choose it, else what a kernel draws it from."""
    choice = sampler.choice_of_scores()
    if choice is None or choice is BEST:
        return sampler.sample(logits)
    return _Scored(sampler.scores(logits)[0], choice)


def _checked(tokens: TokenIds, logits: Row, dtype: str) -> Sequence[int | RequestError]:
    results: list[int | RequestError] = tokens.tolist()
    for index in np.flatnonzero(~np.isfinite(logits)):
        results[index] = unusable_logits(int(tokens[index]), float(logits[index]), dtype)
    return results


def nothing_allowed(params: SamplingParams) -> RequestError:
    """The error if all tokens are forbidden."""
    names = ("grammar", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors")
    rules = [name for name in names if getattr(params, name)]
    return RequestError(
        f"no token is allowed next: {' and '.join(rules) or 'the model'} forbid{'s' * (len(rules) < 2)} all of them",
        at=", ".join(rules) or None,
        fix="forbid less",
    )


def _seed(seed: int | None, choice: int) -> int:
    """The 32-bit seed of a choice's random numbers. None draws a new one each time."""
    sequence = np.random.SeedSequence(seed, spawn_key=(choice,) if choice else ())
    return int(sequence.generate_state(1).view(np.int32)[0])


def _draw(scores: Row, best: int, params: SamplingParams, seed: int, counter: int) -> int:
    """Draw one of the tokens that the filters keep."""
    return largest_sum(_scaled(scores, best, params), seed, counter)


def _scaled(scores: Row, best: int, params: SamplingParams) -> Row:
    """The scores to which noise is added: divided by the temperature, and -inf for filtered tokens."""
    ids, _ = candidates(scores, best, params)
    scaled: Row = (scores - scores[best]) * per_temperature(params)
    if ids is not None:
        kept = np.full(len(scores), -np.inf, np.float32)
        kept[ids] = scaled[ids]
        scaled = kept
    return scaled
