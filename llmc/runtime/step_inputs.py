"""The arrays that a step reads, allocated once and filled from the scheduler's plan."""

from __future__ import annotations

import numpy as np

from llmc.program import Limits
from llmc.runtime.scheduler import Chunk, StepPlan
from llmc.runtime.step import Step


class StepInputs:
    """Room for the largest step that the limits allow, and the block tables of all running requests.

    The tables stay from step to step: only those of requests whose blocks have changed are written again.
    """

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._input_ids = np.zeros(limits.max_batch_tokens, np.int32)
        self._positions = np.zeros(limits.max_batch_tokens, np.int32)
        self._slots = np.zeros(limits.max_batch_tokens, np.int32)
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)
        self._lengths = np.zeros(limits.max_sequences, np.int32)
        blocks = -(-limits.max_model_len // limits.block_size)
        self._running_tables = np.zeros((limits.max_sequences, blocks), np.int32)
        self._tables = np.zeros(limits.max_sequences * blocks, np.int32)
        self._rows = np.zeros(limits.max_logit_rows, np.int32)
        self._counting = np.arange(max(limits.max_batch_tokens, limits.max_sequences) + 1, dtype=np.int32)

    def fill(self, plan: StepPlan) -> Step:
        """The arrays of a plan's tokens, one request after the other."""
        size, decodes, chunks = self._block_size, plan.decodes, plan.chunks
        for request in plan.moved:
            assert request.row is not None
            self._running_tables[request.row, : len(request.blocks)] = request.blocks
        requests, tokens = len(decodes) + len(chunks), len(decodes)
        table_rows = np.fromiter([r.row for r in decodes] + [c.request.row for c in chunks], np.intp, requests)
        if decodes:
            self._input_ids[:tokens] = [r.tokens[-1] for r in decodes]
            self._positions[:tokens] = [r.computed for r in decodes]
            positions = self._positions[:tokens]
            blocks = self._running_tables[table_rows[:tokens], positions // size]
            np.add(blocks * size, positions % size, out=self._slots[:tokens])
            np.add(positions, 1, out=self._lengths[:tokens])
            self._rows[:tokens] = self._counting[:tokens]
        self._starts[: tokens + 1] = self._counting[: tokens + 1]
        rows = tokens
        for r, chunk in enumerate(chunks, len(decodes)):
            end = tokens + chunk.count
            self._fill_chunk(chunk, tokens)
            self._starts[r + 1] = end
            self._lengths[r] = chunk.start + chunk.count
            self._rows[rows : rows + chunk.logit_rows] = self._counting[end - chunk.logit_rows : end]
            tokens, rows = end, rows + chunk.logit_rows
        width = -(-int(self._lengths[:requests].max()) // size)
        tables = self._tables[: requests * width].reshape(requests, width)
        np.take(self._running_tables[:, :width], table_rows, axis=0, out=tables, mode="clip")
        return Step(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            slot_mapping=self._slots[:tokens],
            query_starts=self._starts[: requests + 1],
            context_lens=self._lengths[:requests],
            block_tables=tables,
            logit_rows=self._rows[:rows],
        )

    def _fill_chunk(self, chunk: Chunk, begin: int) -> None:
        request, size, stop, end = chunk.request, self._block_size, chunk.start + chunk.count, begin + chunk.count
        self._input_ids[begin:end] = request.tokens[chunk.start : stop]
        self._positions[begin:end] = np.arange(chunk.start, stop)
        blocks, inside = np.divmod(self._positions[begin:end], size)
        assert request.row is not None
        self._slots[begin:end] = self._running_tables[request.row][blocks] * size + inside
