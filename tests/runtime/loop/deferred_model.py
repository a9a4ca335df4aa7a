"""An executor that queues steps and runs them only when somebody waits, with a model that reads its paged cache.

The logits after a token follow from all tokens that its request's blocks hold up to it. Work is done in order, as late
as possible: what a step needs must be queued with it, and what it gives must be read before it is overwritten.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.program import Limits, StepOutput
from llmc.runtime.executors.executor import Chosen, Logits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.sampling.gumbel_noise import largest_sum
from llmc.runtime.sampling.row_choice import RowChoices

VOCABULARY = 29
# A token that no logits choose: of rows that the device leaves open.
OPEN = VOCABULARY - 1


def logits_after(seen: npt.NDArray[np.int64], odd: bool) -> npt.NDArray[np.float32]:
    """The row after these tokens. odd: some are NaN or infinite."""
    key = zlib.crc32(seen.tobytes())
    row = np.random.default_rng(key).normal(size=VOCABULARY).astype(np.float32) * 3
    row[OPEN] = -100
    if odd and key % 61 == 7:
        row[:] = np.nan
    if odd and key % 61 == 8:
        row[5] = np.inf
    return row


@dataclass
class DeferredModel:
    """window: of a second group of caches, with `window_blocks` blocks, which the logits also follow from. odd: some
    rows have no usable logits, and the device leaves every fifth row open. log: "queue" and "fed" steps,
    "read" tokens, and whole steps, in order. fault: raised once, when the count of calls of the executor gets there."""

    limits: Limits
    blocks: int
    odd: bool = False
    window: int = 0
    window_blocks: int = 0
    log: list[str] = field(default_factory=list)
    fault: tuple[int, BaseException] | None = None
    calls: int = 0

    def __post_init__(self) -> None:
        self.cells = np.full((self.blocks, self.limits.block_size), -1, np.int64)
        self.window_cells = np.full((self.window_blocks, self.limits.block_size), -1, np.int64)
        self._work: list[Callable[[], None]] = []
        self._done = 0
        self._tokens = np.zeros(self.limits.max_logit_rows, np.int32)
        self._all_logits = np.zeros((self.limits.max_logit_rows, VOCABULARY), np.float32)
        self._lanes = [self._lane() for _ in range(2)]
        self._marks = [0, 0]
        self._lane_of_last = 0

    def step(self, step: Step) -> Logits:
        self._call("step")
        self._defer(step.copied(), None, is_fed=False)
        return self.logits(0, len(step.logit_rows))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        self._call("choose")
        return self._queue(step, choices, is_fed=False)()

    def queue(
        self, step: Step, wanted: StepOutput, choices: RowChoices, *, is_fed: bool = False
    ) -> Callable[[], Chosen]:
        self._call("fed" if is_fed else "queue")
        read = self._queue(step, choices, is_fed=is_fed)

        def logged() -> Chosen:
            self._call("read")
            return read()

        return logged

    def logits(self, first: int, count: int) -> Logits:
        self._run_to(self._done + len(self._work))
        return self._all_logits[first : first + count]

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        cells = self.window_cells if group else self.cells

        def copy() -> None:
            cells[list(copies)] = cells[list(copies.values())]

        self._work.append(copy)

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        raise AssertionError("nothing is to be moved")

    def close(self) -> None:
        pass

    def _queue(self, step: Step, choices: RowChoices, *, is_fed: bool) -> Callable[[], Chosen]:
        self._lane_of_last = lane = 1 - self._lane_of_last if is_fed else 0
        self._run_to(self._marks[lane])
        rows = len(step.logit_rows)
        self._defer(step.copied(), choices, is_fed=is_fed)
        self._work.append(lambda: self._bring(lane, rows))
        mark = self._marks[lane] = self._done + len(self._work)

        def read() -> Chosen:
            self._run_to(mark)
            tokens, scores, covered = self._lanes[lane]
            return Chosen(tokens[:rows], scores[:rows], covered[:rows])

        return read

    def _defer(self, step: Step, choices: RowChoices | None, *, is_fed: bool) -> None:
        given = None if choices is None else {name: values.copy() for name, values in choices.arrays().items()}
        self._work.append(lambda: self._compute(step, given, is_fed))

    def _compute(self, step: Step, choices: dict[str, Any] | None, is_fed: bool) -> None:
        ids = self._tokens[: len(step.input_ids)] if is_fed else step.input_ids
        self.cells.reshape(-1)[step.slot_mapping] = ids
        if step.group_slots is not None:
            self.window_cells.reshape(-1)[step.group_slots[0]] = ids
        rows = []
        for token in step.logit_rows:
            request = int(np.searchsorted(step.query_starts, token, "right")) - 1
            behind = int(step.query_starts[request + 1]) - 1 - int(token)
            seen = self.cells[step.block_tables[request]].reshape(-1)[: step.context_lens[request] - behind]
            if step.group_tables is not None and step.group_lens is not None:
                end, size = int(step.group_lens[0, request]) - behind, self.limits.block_size
                near = np.arange(max(0, end - self.window), end)
                latest = self.window_cells[step.group_tables[0, request][near // size], near % size]
                seen = np.concatenate((seen, latest))
            rows.append(logits_after(seen, self.odd))
        self._all_logits[: len(rows)] = np.reshape(rows, (-1, VOCABULARY))
        self._all_logits[len(rows) :] = np.nan
        if choices is not None:
            for row, logits in enumerate(rows):
                self._tokens[row] = self._token(row, logits, choices)

    def _token(self, row: int, logits: npt.NDArray[np.float32], choices: dict[str, Any]) -> int:
        if self._is_open(logits) or not np.isfinite(logits).all():
            return OPEN
        if choices["temperature"][row] == 0:
            return int(logits.argmax())
        return largest_sum(logits - logits.max(), int(choices["seeds"][row]), int(choices["counters"][row]))

    def _is_open(self, logits: npt.NDArray[np.float32]) -> bool:
        return self.odd and zlib.crc32(logits.tobytes()) % 5 == 0

    def _bring(self, lane: int, rows: int) -> None:
        logits = self._all_logits[:rows]
        tokens, scores, covered = self._lanes[lane]
        tokens[:rows] = self._tokens[:rows]
        scores[:rows] = logits.max(1)
        covered[:rows] = [not self._is_open(row) for row in logits]
        tokens[rows:], scores[rows:], covered[rows:] = -1, np.nan, False

    def _lane(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        rows = self.limits.max_logit_rows
        return np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_)

    def _run_to(self, mark: int) -> None:
        while self._done < mark:
            self._work.pop(0)()
            self._done += 1

    def _call(self, name: str) -> None:
        self.calls += 1
        if self.fault is not None and self.calls >= self.fault[0]:
            (_, error), self.fault = self.fault, None
            raise error
        self.log.append(name)
