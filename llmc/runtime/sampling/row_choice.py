"""How a request's token is chosen on the device: a few numbers for each logit row, instead of logits that travel."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmc.program import CHOICE_INPUTS, StepOutput

# As top_k: all tokens (llmc.ops.sampling.EVERY_TOKEN, which needs torch).
EVERY_TOKEN = 2**31 - 1
_DTYPES = {"F32": np.float32, "I32": np.int32}


class RowChoice(NamedTuple):
    """How a token is chosen from a row of logits. temperature: 0 takes the likeliest. top_k: EVERY_TOKEN without one.
    seeds, counters: the seed and counter of the row's random number, int32. They are the request's own, so its draws do
    not depend on its neighbours."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seeds: int
    counters: int

    @property
    def wanted(self) -> StepOutput:
        """The least that a step must do for the row."""
        if self.temperature == 0:
            return StepOutput.BEST
        is_filtered = self.top_k != EVERY_TOKEN or self.top_p < 1 or self.min_p > 0
        return StepOutput.FILTERED if is_filtered else StepOutput.DRAWN

    def later(self, count: int) -> "RowChoice":
        """This choice, for the token after the next `count` tokens."""
        return self if self is BEST else self._replace(counters=self.counters + count)


BEST = RowChoice(0.0, EVERY_TOKEN, 1.0, 0.0, 0, 0)


@dataclass(frozen=True)
class RowChoices:
    """The choices of a step's rows as arrays, [L] each; their names are those of llmc.program.CHOICE_INPUTS.

    reads_logits: some rows have no choice, and the caller of the step reads their logits. is_best: all take the
    likeliest.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int32]
    counters: npt.NDArray[np.int32]
    reads_logits: bool = False
    is_best: bool = False

    @staticmethod
    def of(given: Sequence[RowChoice | None]) -> "RowChoices":
        """Return the arrays for these rows. None in `given` is a row whose logits are read instead; it counts as one
        that takes the likeliest."""
        best, unread = given.count(BEST), given.count(None)
        if best + unread == len(given):  # Most steps; the rest is slower by far.
            return _best(len(given), unread > 0)
        choices = [choice or BEST for choice in given]
        columns = zip(RowChoice._fields, zip(*choices, strict=True), strict=True)
        arrays: dict[str, Any] = {name: np.array(column, _DTYPES[CHOICE_INPUTS[name]]) for name, column in columns}
        return RowChoices(**arrays, reads_logits=unread > 0)

    def arrays(self) -> dict[str, npt.NDArray[np.float32 | np.int32]]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in CHOICE_INPUTS}


@functools.lru_cache(maxsize=256)
def _best(count: int, reads_logits: bool) -> RowChoices:
    """Rows that all take the likeliest, as arrays that cannot be written."""
    values = BEST._asdict().items()
    arrays: dict[str, Any] = {name: np.full(count, value, _DTYPES[CHOICE_INPUTS[name]]) for name, value in values}
    for array in arrays.values():
        array.flags.writeable = False
    return RowChoices(**arrays, reads_logits=reads_logits, is_best=True)


def least_wanted(choices: Sequence[RowChoice | None]) -> StepOutput:
    """The minimum output of a step for these rows. A choice of None needs logits, which exist unless all rows take the
    likeliest token."""
    if choices.count(BEST) == len(choices):
        return StepOutput.BEST
    kinds = {StepOutput.DRAWN if choice is None else choice.wanted for choice in choices}
    return next((kind for kind in (StepOutput.FILTERED, StepOutput.DRAWN) if kind in kinds), StepOutput.BEST)
