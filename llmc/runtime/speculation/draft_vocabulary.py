"""A draft whose vocabulary is a part of the target's: logits of the tokens that it lacks are -inf."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.program import StepOutput
from llmc.runtime.executors.executor import ChoosingExecutor, Chosen, Executor, Logits, SideArray, SideOutputExecutor
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.sampling.row_choice import RowChoices

TokenIds = npt.NDArray[np.int32]


class WidenedExecutor:
    """An executor in the target's vocabulary. ids: the target's token for each of the inner executor's logits."""

    def __init__(self, inner: Executor, ids: TokenIds, vocab_size: int, rows: int) -> None:
        self._inner, self._ids = inner, ids
        self._logits = np.full((rows, vocab_size), -np.inf, np.float32)

    def step(self, step: Step) -> Logits:
        """Run the step; logits [L, vocabulary of the target]."""
        return self._widened(self._inner.step(step))

    def side_output(self, name: str) -> SideArray:
        assert isinstance(self._inner, SideOutputExecutor)
        return self._inner.side_output(name)

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        self._inner.copy_blocks(copies, group)

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        self._inner.move_slots(sources, destinations, group)

    def close(self) -> None:
        self._inner.close()

    def _widened(self, logits: Logits) -> Logits:
        rows = self._logits[: len(logits)]
        rows[:, self._ids] = logits
        return rows


class WidenedChooser(WidenedExecutor):
    """The same for an executor that can choose the most likely token; draws use the noise of the target's ids."""

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """Choose tokens. Either all rows of a step are for the most likely token, or none is."""
        inner: Any = self._inner
        if wanted is StepOutput.BEST:
            chosen = inner.choose(step, wanted, choices)
            return Chosen(self._ids[chosen.tokens], chosen.scores, chosen.covered)
        rows = len(self.step(step))
        return Chosen(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_))

    def logits(self, first: int, count: int) -> Logits:
        """The logits of the last step, which did not choose the likeliest tokens itself."""
        return self._logits[first : first + count]


def in_vocabulary(inner: Executor, ids: TokenIds | None, vocab_size: int, rows: int) -> Executor:
    """The executor in a vocabulary of this size. ids: None if it has that vocabulary. rows: maximum rows of logits per
    step."""
    if ids is None:
        return inner
    return (WidenedChooser if isinstance(inner, ChoosingExecutor) else WidenedExecutor)(inner, ids, vocab_size, rows)
