"""Choose drafts from a second engine's logits as their requests choose their own tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.executors.executor import ChoosingExecutor, DrawingExecutor, Executor, Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.requests.boundary import attempts
from llmc.runtime.sampling.row_choice import RowChoice, RowChoices, least_wanted
from llmc.runtime.sampling.sampler import Row, Sampler
from llmc.runtime.speculation.acceptance import Probabilities


class Likely(NamedTuple):
    """Tokens and their probabilities, [tokens] each."""

    tokens: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


class Drawn(NamedTuple):
    """A draft and the distribution that it was drawn from, if that is requested and it was drawn."""

    token: int
    origin: Probabilities | None = None


# A request's sampler, which is left as it is, and the drafts that come before.
Guess = tuple[Sampler, Sequence[int]]


def choose_drafts(
    executor: Executor, step: Step, guesses: Sequence[Guess], *, says_from_what: bool
) -> list[Drawn | RequestError]:
    """Run the step and choose a draft for each guess, from its first logit rows; there may be one more row."""
    if says_from_what:
        return attempts(_drawn, _with_rows(guesses, executor.step(step)))
    return draft_tokens(executor, step, guesses)


def likely_tokens(executor: Executor, step: Step, guesses: Sequence[Guess], most: int) -> list[Likely | RequestError]:
    """Run the step; for each guess the `most` most likely tokens, the most likely first."""
    rows = [(*row, most) for row in _with_rows(guesses, executor.step(step))]
    return attempts(_likely, rows)


def draft_tokens(executor: Executor, step: Step, guesses: Sequence[Guess]) -> list[Drawn | RequestError]:
    """Run the step; a token for each of its first rows of logits, chosen on the device if possible."""
    choices = attempts(_choice, guesses)
    known = [choice for choice in choices if isinstance(choice, RowChoice)]
    if len(known) < len(step.logit_rows) or not isinstance(executor, ChoosingExecutor):
        logits = executor.step(step)
    else:
        chosen = executor.choose(step, least_wanted(known), RowChoices.of(known))
        if chosen.covered.all():
            return [Drawn(token) for token in chosen.tokens.tolist()]
        logits = executor.logits(0, len(guesses))
    guessed = _guess(executor, logits, guesses)
    return [choice if isinstance(choice, RequestError) else own for choice, own in zip(choices, guessed, strict=True)]


def _guess(executor: Executor, logits: Logits, guesses: Sequence[Guess]) -> list[Drawn | RequestError]:
    """A token for each guess, from one kernel if it can draw all of them."""
    outcomes = attempts(_scored, _with_rows(guesses, logits))
    scored = [outcome for outcome in outcomes if isinstance(outcome, _Scored)]
    choices = [row.choice for row in scored if row.choice is not None]
    if scored and len(choices) == len(scored) and isinstance(executor, DrawingExecutor):
        tokens = iter(executor.draw(np.stack([row.scores for row in scored]), RowChoices.of(choices)).tolist())
        return [Drawn(next(tokens)) if isinstance(outcome, _Scored) else outcome for outcome in outcomes]
    return attempts(
        _guessed, [(sampler, drafts, own) for (sampler, drafts), own in zip(guesses, outcomes, strict=True)]
    )


class _Scored(NamedTuple):
    """The scores to guess from, and a kernel's parameters for drawing from them; None if a kernel cannot."""

    scores: Row
    choice: RowChoice | None


def _with_rows(guesses: Sequence[Guess], logits: Logits) -> list[tuple[Sampler, Sequence[int], Row]]:
    return [(sampler, drafts, row) for (sampler, drafts), row in zip(guesses, logits, strict=False)]


def _choice(sampler: Sampler, drafts: Sequence[int]) -> RowChoice | None:
    return sampler.choice_ahead(len(drafts))


def _scored(sampler: Sampler, drafts: Sequence[int], row: Row) -> _Scored:
    scores, choice = sampler.scores_ahead(row, drafts), sampler.choice_of_scores()
    can_draw = choice is not None and np.isfinite(scores.max())
    return _Scored(scores, choice.later(len(drafts)) if choice is not None and can_draw else None)


def _guessed(sampler: Sampler, drafts: Sequence[int], scored: _Scored | RequestError) -> Drawn:
    if isinstance(scored, RequestError):
        raise scored
    return Drawn(sampler.guess(scored.scores, len(drafts)))


def _drawn(sampler: Sampler, drafts: Sequence[int], row: Row) -> Drawn:
    """A token and its distribution, which is None for a greedy request."""
    scores = sampler.scores_ahead(row, drafts)
    best = int(scores.argmax())
    can_draw = sampler.is_random and np.isfinite(scores[best])
    return Drawn(sampler.guess(scores, len(drafts)), sampler.probabilities(scores, best) if can_draw else None)


def _likely(sampler: Sampler, drafts: Sequence[int], row: Row, most: int) -> Likely:
    return Likely(*sampler.likely(sampler.scores_ahead(row, drafts), len(drafts), most))
