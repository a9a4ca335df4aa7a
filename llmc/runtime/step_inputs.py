"""The arrays that a step reads, allocated once and filled from the scheduler's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.program import Limits
from llmc.runtime.scheduler import Chunk

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """One step's inputs, int32 views that stay valid until the next one: T tokens of R requests, L wanted rows.

    input_ids, positions, slot_mapping: [T]; query_starts: [R + 1]; context_lens: [R]; block_tables: [R, B];
    logit_rows: [L], indices into the tokens.
    """

    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    logit_rows: Ints


class StepInputs:
    """Room for the largest step that the limits allow."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._input_ids = np.zeros(limits.max_batch_tokens, np.int32)
        self._positions = np.zeros(limits.max_batch_tokens, np.int32)
        self._slots = np.zeros(limits.max_batch_tokens, np.int32)
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)
        self._lengths = np.zeros(limits.max_sequences, np.int32)
        blocks = -(-limits.max_model_len // limits.block_size)
        self._tables = np.zeros(limits.max_sequences * blocks, np.int32)
        self._rows = np.zeros(limits.max_logit_rows, np.int32)

    def fill(self, chunks: Sequence[Chunk]) -> Step:
        """The arrays of these chunks' tokens, one request after the other."""
        width = max(-(-(chunk.start + chunk.count) // self._block_size) for chunk in chunks)
        tables = self._tables[: len(chunks) * width].reshape(len(chunks), width)
        begin, rows = 0, 0
        for r, chunk in enumerate(chunks):
            stop, end = chunk.start + chunk.count, begin + chunk.count
            used = -(-stop // self._block_size)
            tables[r, :used] = chunk.request.blocks[:used]
            tables[r, used:] = 0
            self._fill_tokens(chunk, begin, tables[r])
            self._starts[r + 1] = end
            self._lengths[r] = stop
            if chunk.logit_rows == 1:
                self._rows[rows] = end - 1
            else:
                self._rows[rows : rows + chunk.logit_rows] = np.arange(end - chunk.logit_rows, end)
            begin, rows = end, rows + chunk.logit_rows
        return Step(
            input_ids=self._input_ids[:begin],
            positions=self._positions[:begin],
            slot_mapping=self._slots[:begin],
            query_starts=self._starts[: len(chunks) + 1],
            context_lens=self._lengths[: len(chunks)],
            block_tables=tables,
            logit_rows=self._rows[:rows],
        )

    def _fill_tokens(self, chunk: Chunk, begin: int, table: Ints) -> None:
        request, size = chunk.request, self._block_size
        if chunk.count == 1:  # Decoding: plain numbers are several times faster than arrays of one element.
            self._input_ids[begin] = request.tokens[chunk.start]
            self._positions[begin] = chunk.start
            self._slots[begin] = request.blocks[chunk.start // size] * size + chunk.start % size
            return
        stop, end = chunk.start + chunk.count, begin + chunk.count
        self._input_ids[begin:end] = request.tokens[chunk.start : stop]
        self._positions[begin:end] = np.arange(chunk.start, stop)
        blocks, inside = np.divmod(self._positions[begin:end], size)
        self._slots[begin:end] = table[blocks] * size + inside
