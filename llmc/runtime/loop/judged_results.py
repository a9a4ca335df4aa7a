"""The results of a step with drafts that are not judged by equality with the drawn token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.speculation.acceptance import Acceptance, Judged
from llmc.runtime.speculation.draft import Draft


class StepResults(Protocol):
    """A step's logits, and the tokens chosen from them."""

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Return rows [count, vocabulary], perhaps copied from a device; overwritten by the next call."""

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Return each sampler's token for its row, or the reason for none. `rows` ascend."""

    def guesses(self, first: int, count: int) -> Sequence[int]:
        """Cheap guesses of the tokens after these rows: for drafts, not for answers."""


def with_judgement(plan: StepPlan, results: StepResults) -> StepResults:
    """The results, or those in which rows before judged drafts have the tokens that these are judged to."""
    judged: dict[int, tuple[Draft, int]] = {}
    acceptance: Acceptance | None = None
    row = len(plan.decodes)
    for chunk in plan.chunks:
        if chunk.draft.acceptance is not None:
            acceptance = chunk.draft.acceptance
            judged.update({row + index: (chunk.draft, index) for index in range(len(chunk.draft))})
        row += chunk.logit_rows
    return results if acceptance is None else _JudgedResults(results, acceptance, judged)


@dataclass(frozen=True)
class _JudgedResults:
    """Results of a step in which drafts are judged. judged: by row, the draft and which of its tokens may follow."""

    results: StepResults
    acceptance: Acceptance
    judged: Mapping[int, tuple[Draft, int]]

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Return rows of logits, unchanged."""
        return self.results.logits(first, count)

    def guesses(self, first: int, count: int) -> Sequence[int]:
        """The guesses, unchanged."""
        return self.results.guesses(first, count)

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        """Judged, and the others chosen as ever."""
        plain = [index for index, row in enumerate(rows) if row not in self.judged]
        judged = [index for index, row in enumerate(rows) if row in self.judged]
        chosen = self.results.tokens([samplers[i] for i in plain], [rows[i] for i in plain]) if plain else ()
        decided = self.acceptance.tokens([self._row(samplers[i], rows[i]) for i in judged])
        by_index = dict(zip((*plain, *judged), (*chosen, *decided), strict=True))
        return [by_index[index] for index in range(len(rows))]

    def _row(self, sampler: Sampler, row: int) -> Judged:
        draft, index = self.judged[row]
        drawn_from = None if draft.probabilities is None else draft.probabilities[index]
        # A copy: rows may be fetched one by one from a device, each to the same place.
        return Judged(sampler, self.logits(row, 1)[0].copy(), draft.tokens[index], drawn_from)
