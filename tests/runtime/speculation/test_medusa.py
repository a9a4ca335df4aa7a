"""Drafting with heads: which row is asked, what is drafted of it, how candidates are weighed, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmc import load
from llmc.errors import OptionError, RequestError
from llmc.program.step_outputs import DRAFT_IDS, DRAFT_LOGPROBS
from llmc.runtime.executors.executor import Logits, SideArray
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.scheduling.step_plan import Chunk, StepPlan
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.medusa import MedusaDrafter
from tests.runtime.speculation.guesses import proposed

SIDES = (DRAFT_IDS, DRAFT_LOGPROBS)


@dataclass(frozen=True)
class Left:
    """An executor and results of a step that left these candidates: by row, [heads, candidates]. likely: they are."""

    ids: Sequence[Sequence[Sequence[int]]]
    likely: Sequence[Sequence[float]]

    def step(self, step: Step) -> Logits:
        raise NotImplementedError

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        raise NotImplementedError

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def logits(self, first: int, count: int) -> Logits:
        raise NotImplementedError

    def tokens(self, samplers: Sequence[Sampler], rows: Sequence[int]) -> Sequence[int | RequestError]:
        raise NotImplementedError

    def guesses(self, first: int, count: int) -> Sequence[int]:
        raise NotImplementedError

    def side_output(self, name: str) -> SideArray:
        if name == DRAFT_IDS:
            return np.asarray(self.ids, np.int32)
        return np.log(np.broadcast_to(np.asarray(self.likely, np.float32), np.shape(self.ids)))


def request(*tokens: int) -> Generation:
    sampler = Sampler(SamplingParams(temperature=0.0), np.asarray(tokens), 100, np.zeros(0, np.int64))
    return Generation(tokens, sampler, Ending(frozenset(), frozenset(), 50), origin=Origin())


def observe(drafter: MedusaDrafter, chunks: list[Chunk], left: Left) -> None:
    drafter.observe(ComputedStep(StepPlan([], chunks, {}, [], [], {}), SIDES, left, left))


def test_the_row_of_the_last_token_that_came_true_is_asked() -> None:
    drafter = MedusaDrafter()
    own = request(1, 2, 3)
    own.tokens.append(4)
    left = Left([[[10], [12]], [[20], [22]], [[30], [32]]], [[0.6], [0.5]])
    observe(drafter, [Chunk(own, 0, 3, 1)], left)
    assert drafter.propose([own], [5]) == [Draft([10, 12])]
    # A draft of two, of which the first came true: row 1 of three.
    own.tokens += [10, 99]
    observe(drafter, [Chunk(own, 3, 3, 3, Draft([10, 12]))], left)
    assert drafter.propose([own], [5]) == [Draft([20, 22])]
    assert drafter.propose([own], [1]) == [Draft([20])] and drafter.propose([own], [0]) == [NO_DRAFT]


def test_nothing_is_drafted_of_rows_that_are_not_the_requests_last() -> None:
    drafter = MedusaDrafter()
    own, other = request(1, 2), request(5)
    own.tokens.append(3)
    observe(drafter, [Chunk(own, 0, 2, 1)], Left([[[7]]], [[0.5]]))
    own.tokens.append(4)  # In a step that left no candidates.
    assert drafter.propose([own, other], [3, 3]) == [NO_DRAFT, NO_DRAFT]
    drafter.forget(own)
    drafter.forget(other)
    assert drafter.sides(False, True) == () and drafter.sides(True, False) == SIDES


def test_trees_take_the_candidates_that_are_expected_to_come_true() -> None:
    drafter = MedusaDrafter()
    own = request(1)
    own.tokens.append(2)
    likely = [[0.5, 0.4], [0.6, 0.1]]
    observe(drafter, [Chunk(own, 0, 1, 1)], Left([[[10, 11], [20, 21]]], likely))
    (draft,) = proposed(drafter.propose([own], [4]))
    assert sorted(zip(draft.tokens, draft.parents or (), strict=True)) == [(10, None), (11, None), (20, 0), (20, 2)]


def test_candidates_are_weighed_by_how_often_their_head_and_rank_was_right() -> None:
    """A head that is sure and always wrong in its first candidate, and right in its second."""
    drafter = MedusaDrafter()
    own = request(1)
    own.tokens.append(2)
    left = Left([[[10, 11], [20, 21]]], [[0.9, 0.05], [0.5, 0.4]])
    for _ in range(200):
        observe(drafter, [Chunk(own, len(own.tokens) - 2, 1, 1)], left)
        own.tokens.append(11)
    own.tokens[-1:] = []
    (draft,) = proposed(drafter.propose([own], [1]))
    assert list(draft.tokens) == [11]


def test_an_engine_without_heads_is_refused_with_the_commands_that_give_it_some(draft_engine: Path) -> None:
    with pytest.raises(OptionError, match="has no draft heads") as caught:
        load(draft_engine, speculation={"method": "medusa"})
    fix = str(caught.value.fix)
    assert "llmc train-medusa" in fix and "llmc build MODEL --speculative" in fix


def test_heads_elsewhere_are_to_be_built_in(draft_engine: Path) -> None:
    with pytest.raises(OptionError, match="is in the engine, but model names another") as caught:
        load(draft_engine, speculation={"method": "medusa", "model": "heads.safetensors"})
    assert "--speculative heads.safetensors" in str(caught.value.fix)
