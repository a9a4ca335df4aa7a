"""Drafts from the target's hidden states, by EAGLE-3's layers and by those that models bring with them (MTP).

The draft is a second engine over the target's blocks, whose row i is made of the target's hidden state after token i
and of token i + 1. A step that gives a request its draft begins with the rows of what the target has computed since, of
which the last one gives the first draft, or several; then the draft's own hidden states take the target's place, one
token a step, or one level of a tree. Those rows are written over when the target has computed their tokens.

Hidden states are there once. Prompts are read as they are computed; what was computed while drafts did not pay is left
out, and the draft's cache then begins at the next block. Answers never depend on any of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from llmc.program import HIDDEN, Limits
from llmc.runtime.executors.executor import Executor, SideOutputExecutor
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.acceptance import Probabilities
from llmc.runtime.speculation.candidates import Candidates, ChainCandidates, TreeCandidates
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.draft_cache import DraftCache
from llmc.runtime.speculation.drafter import CachingDrafter
from llmc.runtime.speculation.growing_tree import GrowingTree, Level
from llmc.runtime.speculation.hidden_rows import HiddenRows
from llmc.runtime.speculation.hidden_step import HiddenReading, hidden_step, level_step


class HiddenDrafter(CachingDrafter):
    """executor: of the draft, in the target's vocabulary, with as many blocks as the target's. limits: of its steps.
    width: tokens of a request that a step goes on from; 1 for chains. says_from_what: whether drafts, which are chains
    then, come with what they were drawn from."""

    def __init__(self, executor: Executor, limits: Limits, *, width: int, says_from_what: bool = False) -> None:
        assert isinstance(executor, SideOutputExecutor)
        self._says_from_what = says_from_what
        self._executor, self._limits = executor, limits
        rows = min(limits.max_batch_tokens, limits.max_logit_rows)
        is_chain = says_from_what or min(width, rows) == 1
        self._candidates: Candidates = (
            ChainCandidates(says_from_what=says_from_what) if is_chain else TreeCandidates(min(width, rows))
        )
        self._seats = min(limits.max_sequences, rows // self._candidates.width)
        self._cache = DraftCache(executor, limits.block_size)
        self._rows = HiddenRows(limits.block_size)
        self._asked = False

    def watch(self, pool: BlockPool) -> None:
        """Its cache follows the pool's blocks."""
        pool.watch(self)

    def given(self, blocks: Sequence[int]) -> None:
        """As a BlockWatcher."""
        self._cache.given(blocks)
        self._rows.given(blocks)

    def copied(self, block: int, source: int) -> None:
        """As a BlockWatcher."""
        self._cache.copied(block, source)
        self._rows.copied(block, source)

    def close(self) -> None:
        """Free the draft's engine."""
        self._executor.close()

    def sides(self, pays: bool, has_prompts: bool) -> tuple[str, ...]:
        """Hidden states: of what decodes where drafts pay, and of every prompt, which nobody computes again."""
        self._asked = pays or has_prompts
        return (HIDDEN,) if self._asked else ()

    def observe(self, step: ComputedStep) -> None:
        """Keep the hidden states of what was computed, and read prompts at once, but for their last token."""
        if not self._asked:
            return
        hidden = step.side_output(HIDDEN).astype(np.float32, copy=False)
        prompts = []
        for chunk in step.chunks():
            request = chunk.request
            if request.finished or not isinstance(request, SampledRequest):
                continue
            self._rows.add(request, chunk.start, hidden[[chunk.token_row + index for index in chunk.own]])
            if chunk.tokens > 1 and chunk.logit_rows < chunk.tokens:
                prompts.append(request)
        self._read(prompts)

    def forget(self, request: SampledRequest) -> None:
        """What it has read may serve others."""
        self._cache.forget(request)
        self._rows.forget(request)
        self._candidates.forget(request)

    def propose(self, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        """As many drafts as are asked for, of requests whose last tokens' hidden states are there."""
        found = [NO_DRAFT] * len(requests)
        wanting = [index for index, count in enumerate(most) if count]
        for begin in range(0, len(wanting), self._seats):
            group = wanting[begin : begin + self._seats]
            drafts = self._write([(requests[index], most[index]) for index in group])
            for index, draft in zip(group, drafts, strict=True):
                found[index] = draft
        return found

    def _write(self, asked: Sequence[tuple[SampledRequest, int]]) -> list[Draft]:
        """So many drafts for each of at most `_seats` requests."""
        trees = [GrowingTree(most, self._candidates.width) for _, most in asked]
        origins: list[list[Probabilities | None]] = [[] for _ in asked]
        going, readings = self._unread([request for request, _ in asked])
        nodes: list[tuple[int, int | None]] = [(index, None) for index in going]
        step = hidden_step(readings, self._limits.block_size, max(1, len(going)), (HIDDEN,)) if readings else None
        while step is not None:
            places = [(asked[index][0], trees[index].path(node)) for index, node in nodes]
            found = self._candidates.after(self._executor, step, places)
            hidden = self._executor.side_output(HIDDEN).copy()
            for (index, node), following, state in zip(nodes, found, hidden, strict=False):
                trees[index].grow(node, following.candidates, state)
                origins[index].append(following.drawn_from)
            levels = {index: level for index in going if (level := trees[index].next_level()) is not None}
            nodes = [(index, node) for index, level in levels.items() for node in level.nodes]
            read = [(self._level(asked[index][0], level), level) for index, level in levels.items()]
            step = level_step(read, self._limits.block_size, (HIDDEN,)) if read else None
        drafts = [tree.draft() for tree in trees]
        if not self._says_from_what:
            return drafts
        return [replace(draft, probabilities=origin) for draft, origin in zip(drafts, origins, strict=True)]

    def _level(self, request: SampledRequest, level: Level) -> HiddenReading:
        """Nodes of its tree, which begins behind the row of its last token's hidden state."""
        return self._reading(request, len(request.tokens) - 1 + level.first, level.tokens, level.hidden)

    def _unread(self, requests: Sequence[SampledRequest]) -> tuple[list[int], list[HiddenReading]]:
        """What one step can read of the requests' last tokens, the shortest readings first; and of which that is the
        rest, in the same order."""
        found = {}
        for index, request in enumerate(requests):
            reading = self._rest(request, len(request.tokens) - 1)
            if reading is not None:
                found[index] = reading
        room, readings, ready = self._limits.max_batch_tokens, [], []
        for index, reading in sorted(found.items(), key=lambda item: len(item[1].tokens)):
            if len(reading.tokens) > room:
                readings += [self._noted(requests[index], _first(reading, room))] if room else []
                break
            room -= len(reading.tokens)
            readings.append(self._noted(requests[index], reading))
            ready.append(index)
        return ready, readings

    def _read(self, requests: Iterable[SampledRequest]) -> None:
        """All of the requests' rows but the last, whose step gives the first draft."""
        left = list(requests)
        while left:
            room, readings, going = self._limits.max_batch_tokens, [], []
            for request in left[: self._seats]:
                end = self._rows.end(request)
                reading = None if end is None else self._rest(request, end - 1, is_last=False)
                if reading is None or not reading.tokens:
                    continue
                if room:
                    part = _first(reading, room)
                    room -= len(part.tokens)
                    readings.append(self._noted(request, part))
                going.append(request)
            left = [*going, *left[self._seats :]]
            if readings:
                self._executor.step(hidden_step(readings, self._limits.block_size, 1, ()))

    def _rest(self, request: SampledRequest, end: int, is_last: bool = True) -> HiddenReading | None:
        """The rows of a request before `end` that are yet to be read, the last one in any case if `is_last`; None if
        their hidden states are not all there."""
        size, names = self._limits.block_size, _Following(request.tokens)
        start = min(self._cache.known(request, names), end - is_last)
        found = self._rows.found(request, start, end)
        if found is None and self._rows.found(request, end - 1, end) is not None:
            # What comes between is lost: the cache begins behind it.
            first = self._rows.first(request)
            if first is not None and first > start:
                self._cache.skip(request, -(-first // size))
                start = min(self._cache.known(request, names), end - is_last)
                found = self._rows.found(request, start, end)
        if found is None or start < self._cache.skipped(request) * size:
            return None
        return self._reading(request, start, names[start:end], found)

    def _reading(self, request: SampledRequest, start: int, tokens: Sequence[int], hidden: np.ndarray) -> HiddenReading:
        begin = self._cache.skipped(request)
        return HiddenReading(request.standing.blocks[begin:], begin * self._limits.block_size, start, tokens, hidden)

    def _noted(self, request: Request, reading: HiddenReading) -> HiddenReading:
        self._cache.note(request, reading.start, reading.tokens)
        self._rows.read(request, reading.start + len(reading.tokens))
        return reading


class _Following(Sequence[int]):
    """What rows of a draft's cache are called: each by the token after it."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens) - 1

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, int):
            return self._tokens[key + 1]
        start, stop, _ = key.indices(len(self))
        return self._tokens[start + 1 : stop + 1]


def _first(reading: HiddenReading, count: int) -> HiddenReading:
    return reading._replace(tokens=reading.tokens[:count], hidden=reading.hidden[:count])
