"""Drafts from the target's hidden states, by EAGLE-3's layers and by a model's own MTP layers.

The drafter is a second engine over the target's blocks. Its row i is computed from the target's hidden state after
token i and from token i + 1. Drafting begins with the rows of the tokens that the target has computed since; the last
of them gives the first draft, or several. Then the drafter's own hidden states replace the target's, one token per
step, or one level of a tree. These rows are overwritten when the target has computed their tokens.

A draft of several layers has one engine per layer. The next layer reads the same rows, with the hidden states of the
layer before and tokens one place further on; the last of these are drafts. Each layer gives a draft one place further
on. Further drafts come from the last layer, with its own hidden states. Source: DeepSeek-AI 2024, "DeepSeek-V3
technical report", 2.2, which does not describe further drafts.

Hidden states exist only in the step that computes them. Prompts are read while they are computed. Tokens that were
computed while drafts did not pay are skipped, and the draft's cache then begins at the next block. Answers never depend
on any of this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from llmc.errors import RequestError
from llmc.program import HIDDEN, Limits
from llmc.runtime.executors.executor import Executor, SideOutputExecutor
from llmc.runtime.loop.step import Step
from llmc.runtime.requests.boundary import attempt, attempts, errors
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.acceptance import Probabilities
from llmc.runtime.speculation.candidates import Candidates, ChainCandidates, Following, TreeCandidates
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.drafter import CachingDrafter
from llmc.runtime.speculation.growing_tree import GrowingTree, Level
from llmc.runtime.speculation.hidden_rows import Hidden
from llmc.runtime.speculation.hidden_step import HiddenReading, hidden_step, level_step
from llmc.runtime.speculation.unread_rows import Unread, UnreadRows

Found = TypeVar("Found")


@dataclass(eq=False, slots=True)
class _Asked:
    """A request for `most` drafts, and the drafts until now. rows: rows still to be read. is_ready: whether one step
    reads them all. error: the reason if there are none."""

    request: SampledRequest
    most: int
    tree: GrowingTree
    rows: Unread
    is_ready: bool = False
    origins: list[Probabilities | None] = field(default_factory=list)
    error: RequestError | None = None

    def wants(self, layer: int) -> bool:
        """Whether the step of a layer must give it a draft."""
        return self.is_ready and layer < self.most and self.error is None


def _each(work: Callable[[_Asked], Found], asked: Iterable[_Asked]) -> list[tuple[_Asked, Found]]:
    """The result of the work for each request. A request for which it raises gets the error and has no result."""
    asking, kept = [entry for entry in asked if entry.error is None], []
    for current, result in zip(asking, attempts(work, [(entry,) for entry in asking]), strict=True):
        if isinstance(result, RequestError):
            current.error = result
        else:
            kept.append((current, result))
    return kept


class HiddenDrafter(CachingDrafter):
    """Drafts with layers that read the model's hidden states. layers: executors of the drafter, in the target's
    vocabulary, with the target's number of blocks. limits: limits of their steps. width: number of a request's nodes
    that a step expands; 1 for chains, and always with several layers. says_from_what: whether drafts, which are then
    chains, come with their distributions."""

    def __init__(self, layers: Sequence[Executor], limits: Limits, *, width: int, says_from_what: bool = False) -> None:
        self._says_from_what = says_from_what
        self._layers, self._limits = layers, limits
        rows = min(limits.max_batch_tokens, limits.max_logit_rows)
        is_chain = says_from_what or len(layers) > 1 or min(width, rows) == 1
        self._candidates: Candidates = (
            ChainCandidates(says_from_what=says_from_what) if is_chain else TreeCandidates(min(width, rows))
        )
        self.seats = min(limits.max_sequences, rows // self._candidates.width)
        self._unread = UnreadRows(layers, limits.block_size)
        self._asked = False

    def watch(self, pool: BlockPool) -> None:
        """Follow the pool's blocks with its cache."""
        pool.watch(self._unread)

    def close(self) -> None:
        """Free the draft's engines."""
        for layer in self._layers:
            layer.close()

    def sides(self, pays: bool, has_prompts: bool) -> tuple[str, ...]:
        """Hidden states: those of decodes if drafts pay, and those of every prompt, which is not computed again."""
        self._asked = pays or has_prompts
        return (HIDDEN,) if self._asked else ()

    def observe(self, step: ComputedStep) -> Mapping[Request, RequestError]:
        """Store the hidden states of computed tokens, and read prompts at once, except their last token."""
        if not self._asked:
            return {}
        hidden = step.side_output(HIDDEN).astype(np.float32, copy=False)
        added: list[tuple[SampledRequest, int, Hidden]] = []
        prompts = []
        for chunk in step.chunks():
            request = chunk.request
            if request.finished or not isinstance(request, SampledRequest):
                continue
            added.append((request, chunk.start, hidden[[chunk.token_row + index for index in chunk.own]]))
            if chunk.tokens > 1 and chunk.logit_rows < chunk.tokens:
                prompts.append(request)
        failed: dict[Request, RequestError] = {}
        failed |= errors((request for request, *_ in added), attempts(self._unread.add, added))
        return failed | self._read_prompts([request for request in prompts if request not in failed])

    def forget(self, request: SampledRequest) -> None:
        """Drop the request; its cached rows may serve other requests."""
        self._unread.forget(request)
        self._candidates.forget(request)

    def write(self, wanted: Sequence[tuple[SampledRequest, int]]) -> Sequence[Draft | RequestError]:
        """The requested number of drafts for each of at most `seats` requests."""
        outcomes = attempts(self._ask, wanted)
        drafting = [outcome for outcome in outcomes if isinstance(outcome, _Asked)]
        self._read_rows(self._fitting(drafting))
        going = [entry for entry in drafting if entry.is_ready]
        while levels := [(entry, read) for entry, read in _each(self._next_level, going) if read is not None]:
            step = level_step([read for _, read in levels], self._limits.block_size, (HIDDEN,))
            self._grow(-1, step, [(entry, node) for entry, (_, level) in levels for node in level.nodes])
        drafts = dict(_each(self._draft, drafting))
        return [
            NO_DRAFT
            if outcome is None
            else outcome
            if isinstance(outcome, RequestError)
            else outcome.error or drafts[outcome]
            for outcome in outcomes
        ]

    def _ask(self, request: SampledRequest, most: int) -> _Asked | None:
        """The state of a request; None if some of its hidden states are missing."""
        rows = self._unread.to_the_last(request)
        return None if rows is None else _Asked(request, most, GrowingTree(most, self._candidates.width), rows)

    def _next_level(self, asked: _Asked) -> tuple[HiddenReading, Level] | None:
        level = asked.tree.next_level()
        return None if level is None else (self._level(asked.request, level), level)

    def _draft(self, asked: _Asked) -> Draft:
        draft = asked.tree.draft()
        return replace(draft, probabilities=asked.origins) if self._says_from_what else draft

    def _fitting(self, asked: Iterable[_Asked]) -> list[_Asked]:
        """The requests whose rows one step can read, the shortest first, and the first rows of one more."""
        room, fitting = self._limits.max_batch_tokens, []
        for entry in sorted(asked, key=lambda asking: len(asking.rows.hidden)):
            entry.is_ready = len(entry.rows.hidden) <= room
            if not entry.is_ready:
                entry.rows = entry.rows.first(room)
                _each(self._keep_complete, [entry])
            room -= len(entry.rows.hidden)
            fitting.append(entry)
            if not entry.is_ready:
                break
        return fitting

    def _keep_complete(self, asked: _Asked) -> None:
        """Keep only the rows in which no draft is read."""
        asked.rows = self._unread.complete(asked.rows)

    def _read_rows(self, asked: Iterable[_Asked]) -> None:
        """Read the rows in all layers; each layer gives one draft for the requests that are ready and need that
        many."""
        asked = [entry for entry, _ in _each(lambda asking: self._unread.read(asking.rows), asked)]
        for layer in range(len(self._layers)):

            def reading(asked: _Asked, layer: int = layer) -> HiddenReading | None:
                if not asked.wants(layer):
                    self._keep_complete(asked)
                return self._unread.reading(asked.rows, layer, asked.tree.tokens) if len(asked.rows.hidden) else None

            read = {entry: result for entry, result in _each(reading, asked) if result is not None}
            asked = sorted(read, key=lambda asking: not asking.wants(layer))
            if not asked:
                return
            wanting = [entry for entry in asked if entry.wants(layer)]
            readings = [read[entry] for entry in asked]
            step = hidden_step(readings, self._limits.block_size, max(1, len(wanting)), (HIDDEN,))
            # Until now each tree is a chain, with one node per layer that has read.
            states = self._grow(layer, step, [(entry, layer - 1 if layer else None) for entry in wanting])
            for current, part in zip(asked, _of_readings(states, readings), strict=True):
                current.rows = current.rows._replace(hidden=part)

    def _grow(self, layer: int, step: Step, nodes: Sequence[tuple[_Asked, int | None]]) -> Hidden:
        """Run a layer's step, whose first rows of logits are for these nodes. Returns the hidden state of each token
        or, for the last layer, of each row of logits."""
        executor = self._layers[layer]
        places = [(entry.request, entry.tree.path(node)) for entry, node in nodes]
        followings = self._candidates.after(executor, step, places)
        states = _states(executor)
        is_last = executor is self._layers[-1]
        rows = states if is_last else states[step.logit_rows]
        for (current, node), following, state in zip(nodes, followings, rows, strict=False):
            _each(partial(_grown, node=node, following=following, state=state), [current])
        return states

    def _level(self, request: SampledRequest, level: Level) -> HiddenReading:
        """Nodes of its tree, which begins after the row of its last token's hidden state."""
        return self._unread.place(request, len(request.tokens) - 1 + level.first, level.tokens, level.hidden)

    def _read_prompts(self, requests: Iterable[SampledRequest]) -> dict[Request, RequestError]:
        """Read all rows of the requests except the last, whose step gives the first draft. Returns the requests that
        fail."""
        left, failed = list(requests), dict[Request, RequestError]()
        while left:
            room, rows, going = self._limits.max_batch_tokens, [], []
            for request in left[: self.seats]:
                unread = attempt(self._next_of_prompt, request, room)
                if isinstance(unread, RequestError):
                    failed[request] = unread
                elif unread is not None:
                    if len(unread.hidden):
                        rows.append(unread)
                        room -= len(unread.hidden)
                    going.append(request)
            left = [*going, *left[self.seats :]]
            if rows:
                self._read_through(rows)
        return failed

    def _next_of_prompt(self, request: SampledRequest, room: int) -> Unread | None:
        """Return at most `room` of the next rows to read, which then count as read; None if there are no more."""
        unread = self._unread.of_prompt(request)
        if unread is None:
            return None
        rows = unread.first(room)
        if room:
            self._unread.read(rows)
        return rows

    def _read_through(self, rows: list[Unread]) -> None:
        """Read rows without drafts in all layers."""
        for number, layer in enumerate(self._layers):
            is_last = layer is self._layers[-1]
            readings = [self._unread.reading(row, number, ()) for row in rows]
            layer.step(hidden_step(readings, self._limits.block_size, 1, () if is_last else (HIDDEN,)))
            if not is_last:
                states = _of_readings(_states(layer), readings)
                rows = [row._replace(hidden=part) for row, part in zip(rows, states, strict=True)]


def _grown(asked: _Asked, node: int | None, following: Following | RequestError, state: Hidden) -> None:
    if isinstance(following, RequestError):
        raise following
    asked.tree.grow(node, following.candidates, state)
    asked.origins.append(following.drawn_from)


def _states(layer: Executor) -> Hidden:
    """A copy of the hidden states of the layer's last step."""
    assert isinstance(layer, SideOutputExecutor)
    states: Hidden = layer.side_output(HIDDEN).astype(np.float32)
    return states


def _of_readings(states: Hidden, readings: Sequence[HiddenReading]) -> Iterator[Hidden]:
    """The hidden states of each reading's tokens, from those of the step's tokens."""
    begin = 0
    for reading in readings:
        yield states[begin : begin + len(reading.tokens)]
        begin += len(reading.tokens)
