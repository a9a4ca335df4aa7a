"""A second engine without a model, for the scheduler's tests: what it says is a checksum of its cache, which shows
whether that holds just what the request has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmc.program import Limits
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.draft_model import DraftModel
from tests.runtime.model_free import next_token
from tests.runtime.speculation.guesses import proposed

VOCABULARY = 97


def second_token(tokens: Sequence[int]) -> int:
    """What the second engine says after these: often what the first one does."""
    return (next_token(tokens) + (len(tokens) % 5 == 0)) % VOCABULARY


class Cells:
    """An executor whose cache holds tokens, and whose likeliest token is `second_token` of those. steps, tokens: that
    it has read."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.cells = np.full((blocks, block_size), -1, np.int64)
        self.steps = self.tokens = 0

    def step(self, step: Step) -> Logits:
        self.steps += 1
        self.tokens += len(step.input_ids)
        self.cells.reshape(-1)[step.slot_mapping] = step.input_ids
        logits = np.zeros((len(step.logit_rows), VOCABULARY), np.float32)
        for row, place in enumerate(step.logit_rows.tolist()):
            request = int(np.searchsorted(step.query_starts, place, side="right")) - 1
            count = int(step.context_lens[request]) - (int(step.query_starts[request + 1]) - 1 - place)
            held = self.cells[step.block_tables[request]].reshape(-1)[:count]
            logits[row, second_token(held.tolist())] = 1.0
        return logits

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        self.cells[list(copies)] = self.cells[list(copies.values())]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        cells = self.cells.reshape(-1)
        cells[destinations] = cells[sources]

    def close(self) -> None:
        """Nothing."""


class SecondCells(DraftModel):
    """Its drafts are what they must be, or else its cache has held something wrong. given: how many there were."""

    def __init__(self, blocks: int, limits: Limits) -> None:
        self.cells = Cells(blocks, limits.block_size)
        self.given = 0
        super().__init__(self.cells, limits)

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        drafts = proposed(super().propose(requests, most))
        for request, draft, count in zip(requests, drafts, most, strict=True):
            assert len(draft) in (0, count)
            tokens = list(request.tokens)
            for token in draft.tokens:
                assert token == second_token(tokens)
                tokens.append(token)
            self.given += len(draft)
        return drafts
