"""Choose drafts from a second engine's logits as their requests choose their own tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.runtime.executors.executor import ChoosingExecutor, DrawingExecutor, Executor, Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import RowChoices, least_wanted
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.speculation.acceptance import Probabilities


class Likely(NamedTuple):
    """Tokens, and how likely each is: [tokens] both."""

    tokens: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


# A request's sampler, which is left as it is, and the drafts that come before.
Guess = tuple[Sampler, Sequence[int]]


def choose_drafts(
    executor: Executor, step: Step, guesses: Sequence[Guess], *, says_from_what: bool
) -> tuple[Sequence[int], Sequence[Probabilities | None]]:
    """Run the step: a token for each guess, and what it was drawn from, if that is asked for."""
    if says_from_what:
        return drawn_tokens(executor, step, guesses)
    return draft_tokens(executor, step, guesses), [None] * len(guesses)


def likely_tokens(executor: Executor, step: Step, guesses: Sequence[Guess], most: int) -> list[Likely]:
    """Run the step: what is likely for each guess, `most` tokens at the most, the likeliest first."""
    found = []
    for (sampler, drafts), row in zip(guesses, executor.step(step), strict=False):
        found.append(Likely(*sampler.likely(sampler.scores_ahead(row, drafts), len(drafts), most)))
    return found


def draft_tokens(executor: Executor, step: Step, guesses: Sequence[Guess]) -> list[int]:
    """Run the step; a token for each of its first rows of logits, of which there may be one more."""
    choices = [sampler.choice_ahead(len(drafts)) for sampler, drafts in guesses]
    known = [choice for choice in choices if choice is not None]
    if len(known) < len(step.logit_rows) or not isinstance(executor, ChoosingExecutor):
        return _guess(executor, executor.step(step), guesses)
    chosen = executor.choose(step, least_wanted(known), RowChoices.of(known))
    if not chosen.covered.all():
        return _guess(executor, executor.logits(0, len(guesses)), guesses)
    tokens: list[int] = chosen.tokens.tolist()
    return tokens


def drawn_tokens(
    executor: Executor, step: Step, guesses: Sequence[Guess]
) -> tuple[list[int], list[Probabilities | None]]:
    """As `draft_tokens`; and what each was drawn from, None for those of requests that take the likeliest."""
    logits = executor.step(step)
    tokens: list[int] = []
    drawn_from: list[Probabilities | None] = []
    for (sampler, drafts), row in zip(guesses, logits, strict=False):
        scores = sampler.scores_ahead(row, drafts)
        best = int(scores.argmax())
        can_draw = sampler.is_random and np.isfinite(scores[best])
        tokens.append(sampler.guess(scores, len(drafts)))
        drawn_from.append(sampler.probabilities(scores, best) if can_draw else None)
    return tokens, drawn_from


def _guess(executor: Executor, logits: Logits, guesses: Sequence[Guess]) -> list[int]:
    rows = zip(guesses, logits, strict=False)
    scores = [sampler.scores_ahead(row, drafts) for (sampler, drafts), row in rows]
    choices = [sampler.choice_of_scores() for sampler, _ in guesses]
    later = [c.later(len(drafts)) for c, (_, drafts) in zip(choices, guesses, strict=True) if c is not None]
    can_draw = len(later) == len(guesses) and all(np.isfinite(row.max()) for row in scores)
    if guesses and can_draw and isinstance(executor, DrawingExecutor):
        tokens: list[int] = executor.draw(np.stack(scores), RowChoices.of(later)).tolist()
        return tokens
    return [sampler.guess(row, len(drafts)) for (sampler, drafts), row in zip(guesses, scores, strict=True)]
