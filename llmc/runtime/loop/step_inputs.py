"""The arrays that a step reads, allocated once and filled from the scheduler's plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.errors import RequestError
from llmc.program import Limits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.scheduling.adapter_slots import AdapterSlots
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan


class StepInputs:
    """Room for the largest step that the limits allow.

    The inputs of decodes stay at their places from step to step and are advanced as a whole; only new decodes and those
    with a new block are rewritten. The chunks follow them and are written for each step. adapters: slots of the
    engine's adapters. groups: cache groups, each with its own blocks. numbering: the group whose rows are the
    positions.
    """

    def __init__(
        self, limits: Limits, adapters: AdapterSlots | None = None, groups: int = 1, numbering: int = 0
    ) -> None:
        self._groups, self._numbering = groups, numbering
        self._adapters = adapters
        self._adapter_of_token = np.zeros(limits.max_batch_tokens, np.int32)
        self._block_size = limits.block_size
        self._input_ids = np.zeros(limits.max_batch_tokens, np.int32)
        self._positions = np.zeros(limits.max_batch_tokens, np.int32)
        self._slots = np.zeros((groups, limits.max_batch_tokens), np.int32)
        self._starts = np.zeros(limits.max_sequences + 1, np.int32)
        self._lengths = np.zeros((groups, limits.max_sequences), np.int32)
        # For the requests at their places: what to add to a token's position to get its rows, itself included.
        self._to_rows = np.ones((groups, limits.max_sequences), np.int32)
        blocks = -(-limits.max_model_len // limits.block_size)
        self._standing_tables = np.zeros((groups, limits.max_sequences, blocks), np.int32)
        self._tables = np.zeros(groups * limits.max_sequences * blocks, np.int32)
        self._rows = np.zeros(limits.max_logit_rows, np.int32)
        self._masks = np.zeros(limits.max_batch_tokens, np.int64)
        # The masks that the last step has written; all others are 0.
        self._masked: list[slice] = []
        self._counting = np.arange(max(limits.max_batch_tokens, limits.max_sequences) + 1, dtype=np.int32)
        self._decodes = 0

    def fill(self, plan: StepPlan, sides: tuple[str, ...] = ()) -> Step:
        """The arrays of a plan's tokens, one request after the other. sides: the side outputs that are wanted."""
        size, chunks = self._block_size, plan.chunks
        while self._masked:
            self._masks[self._masked.pop()] = 0
        tokens = rows = self._decodes = len(plan.decodes)
        self._grow(plan)
        self._enter(plan)
        requests = tokens + len(chunks)
        counting = self._counting[: tokens + 1]
        self._starts[: tokens + 1] = counting
        self._rows[:tokens] = counting[:-1]
        np.add(self._positions[:tokens], self._to_rows[:, :tokens], out=self._lengths[:, :tokens])
        for r, chunk in enumerate(chunks, tokens):
            end = tokens + chunk.tokens
            self._starts[r + 1] = end
            for group in range(self._groups):
                self._lengths[group, r] = chunk.start + chunk.tokens - chunk.request.standing.dropped(group)
            self._rows[rows : rows + chunk.logit_rows] = self._counting[end - chunk.logit_rows : end]
            tokens, rows = end, rows + chunk.logit_rows
        width = -(-int(self._lengths[0, :requests].max()) // size)
        tables = self._tables[: self._groups * requests * width].reshape(self._groups, requests, width)
        tables[:, : self._decodes] = self._standing_tables[:, : self._decodes, :width]
        for r, chunk in enumerate(chunks, self._decodes):
            self._fill_chunk(chunk, int(self._starts[r]), tables[:, r])
        of_tokens = self._adapters_of(tokens)
        return Step(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            slot_mapping=self._slots[0, :tokens],
            query_starts=self._starts[: requests + 1],
            context_lens=self._lengths[0, :requests],
            block_tables=tables[0],
            logit_rows=self._rows[:rows],
            tree_masks=self._masks[:tokens],
            sides=sides,
            adapter_of_token=of_tokens,
            adapter_of_logit_row=None if of_tokens is None else of_tokens[self._rows[:rows]],
            group_slots=self._slots[1:, :tokens] if self._groups > 1 else None,
            group_tables=tables[1:] if self._groups > 1 else None,
            group_lens=self._lengths[1:, :requests] if self._groups > 1 else None,
        )

    def _adapters_of(self, tokens: int) -> Ints | None:
        """Return each token's adapter; None if no token has one, so that the step is that of an engine without
        adapters."""
        if self._adapters is None or not self._adapters.held:
            return None
        of_tokens = self._adapter_of_token[:tokens]
        return of_tokens if of_tokens.any() else None

    def advance(self, chosen: Sequence[int | RequestError]) -> None:
        """The last step has given the decodes these tokens, in order; one that got an error does not go on."""
        self.move()
        self.take(chosen)

    def move(self) -> None:
        """Place the decodes' next tokens, which may be unknown yet."""
        self._positions[: self._decodes] += 1
        self._slots[:, : self._decodes] += 1

    def take(self, chosen: Sequence[int | RequestError]) -> None:
        """Take over the decodes' next tokens, in order, for places that `move` has counted."""
        decodes = self._decodes
        if decodes:
            tokens: Any = chosen[:decodes]
            try:
                self._input_ids[:decodes] = tokens
            except TypeError:
                self._input_ids[:decodes] = [t if isinstance(t, int) else 0 for t in tokens]

    def _grow(self, plan: StepPlan) -> None:
        """Update decodes that begin a block: it is the last of their table, and they write its first slot."""
        placed = [(place, r.standing) for r in plan.grown if (place := r.decoding.place) is not None]
        if placed:
            places = [place for place, _ in placed]
            for group in range(self._groups):
                own = [standing.table(group) for _, standing in placed]
                blocks = np.array([table[-1] for table in own], np.int32)
                self._standing_tables[group, places, [len(table) - 1 for table in own]] = blocks
                self._slots[group, places] = blocks * self._block_size

    def _enter(self, plan: StepPlan) -> None:
        for request in plan.entered:
            place = request.decoding.place
            if place is not None:
                position, standing = request.computed, request.standing
                self._input_ids[place] = request.tokens[-1]
                dropped = standing.dropped(self._numbering)
                self._positions[place] = position - dropped
                for group in range(self._groups):
                    blocks = standing.table(group)
                    self._slots[group, place] = standing.slot(group, position, self._block_size)
                    self._to_rows[group, place] = 1 + dropped - standing.dropped(group)
                    self._standing_tables[group, place, : len(blocks)] = blocks
                if self._adapters is not None:
                    self._adapter_of_token[place] = self._adapters.number(request.adapter)

    def _fill_chunk(self, chunk: Chunk, begin: int, tables: Ints) -> None:
        request, size, stop, end = chunk.request, self._block_size, chunk.start + chunk.tokens, begin + chunk.tokens
        self._input_ids[begin:end] = chunk.token_ids
        if self._adapters is not None:
            self._adapter_of_token[begin:end] = self._adapters.number(request.adapter)
        positions = np.arange(chunk.start, stop, dtype=np.int32)
        for group, table in enumerate(tables):
            dropped = request.standing.dropped(group)
            blocks = request.standing.table(group)[: -(-(stop - dropped) // size)]
            table[: len(blocks)] = blocks
            index, inside = np.divmod(positions - dropped, size)
            self._slots[group, begin:end] = table[index] * size + inside
        own = request.standing.dropped(self._numbering)
        self._positions[begin:end] = positions - own
        if chunk.draft.parents is not None:
            drafts = slice(end - len(chunk.draft), end)
            self._positions[drafts] = stop - own - len(chunk.draft) - 1 + np.array(chunk.draft.depths(), np.int32)
            self._masks[drafts] = chunk.draft.masks()
            self._masked.append(drafts)


class StatefulStepInputs(StepInputs):
    """The inputs of an engine with states: each request's states are in the slot of its seat."""

    def fill(self, plan: StepPlan, sides: tuple[str, ...] = ()) -> Step:
        """Fill the inputs of a step, with state_slots."""
        standings = [request.standing for request in (*plan.decodes, *(chunk.request for chunk in plan.chunks))]
        slots = [standing.seat for standing in standings if standing.seat is not None]
        return replace(super().fill(plan, sides), state_slots=np.array(slots, np.int32))
