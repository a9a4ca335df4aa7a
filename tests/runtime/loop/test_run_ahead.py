"""A step is queued before the tokens of the step before it are read, and answers are the same as without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.program import Affine, CacheSlot, Limits, Nearest, Program
from llmc.runtime.loop import run_ahead
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.loop.deferred_model import VOCABULARY, DeferredModel

LIMITS = Limits(max_batch_tokens=12, max_sequences=4, max_logit_rows=5, max_model_len=30, block_size=4)
EOS = frozenset({3})


@dataclass(frozen=True)
class Asked:
    """A client's request. expires: its deadline has passed when the loop first looks."""

    prompt: tuple[int, ...]
    output: int
    seed: int | None = None
    choices: int = 1
    penalty: float = 1.0
    logprobs: int | None = None
    expires: bool = False
    shares: bool = True
    ends: frozenset[int] = EOS

    def sequences(self) -> list[Generation]:
        """The first of them starts the others."""
        params = SamplingParams(
            temperature=0.0 if self.seed is None else 1.0, seed=self.seed, repetition_penalty=self.penalty
        )
        ending = Ending(self.ends, frozenset(), min(LIMITS.max_model_len, len(self.prompt) + self.output))
        deadline = time.monotonic() - 1 if self.expires else None
        origin = Origin(salt=b"" if self.shares else None, deadline=deadline)
        generations: list[Generation] = []
        for index in reversed(range(self.choices)):
            sampler = Sampler(params, np.array(self.prompt), VOCABULARY, np.zeros(0, np.int64), choice=index)
            siblings = tuple(reversed(generations)) if index == 0 else ()
            generations.append(
                Generation(
                    self.prompt, sampler, ending, origin=origin, index=index, siblings=siblings, logprobs=self.logprobs
                )
            )
        return generations[::-1]


def loop_of(model: DeferredModel, *, runs_ahead: bool = True) -> StepLoop:
    program = windowed(model.window) if model.window else None
    return StepLoop(model, LIMITS, model.blocks, program=program, runs_ahead=runs_ahead)


def windowed(window: int) -> Program:
    """Of two layers, one of which sees a window."""
    caches = CacheSlot(1, 1, 1, "F32"), CacheSlot(1, 1, 1, "F32", group=1)
    none = Affine()
    return Program(LIMITS, VOCABULARY, none, none, (), (), caches, policies=(Nearest(window),))


def model_of(blocks: int, *, odd: bool = False, window: int = 0) -> DeferredModel:
    counts = windowed(window).group_blocks(blocks) if window else (blocks, 0)
    return DeferredModel(LIMITS, counts[0], odd, window, counts[1])


def answers(sequences: Sequence[Generation]) -> list[tuple[Any, ...]]:
    return [
        (sequence.output, sequence.finish_reason, sequence.error and sequence.error.problem) for sequence in sequences
    ]


def alone(asked: Asked, odd: bool, window: int = 0) -> list[Generation]:
    """The request by itself, each step read before the next one is planned."""
    loop = loop_of(model_of(40, odd=odd, window=window), runs_ahead=False)
    sequences = asked.sequences()
    loop.add(sequences[0])
    while not loop.scheduler.idle:
        loop.step()
    return sequences


def started(model: DeferredModel, *requests: Asked) -> tuple[StepLoop, list[Generation]]:
    loop, started_ones = loop_of(model), [asking.sequences()[0] for asking in requests]
    for request in started_ones:
        loop.add(request)
    return loop, started_ones


def test_the_next_step_is_queued_before_the_tokens_of_the_last_are_read() -> None:
    model = DeferredModel(LIMITS, 40)
    loop, (request,) = started(model, Asked((1, 2), 6, ends=frozenset()))
    while not request.finished:
        loop.step()
    # The prompt gives the first token. The last step is known to be the last.
    assert model.log == ["choose", "queue", "fed", "read", "fed", "read", "fed", "read", "fed", "read", "read"]
    assert answers([request]) == answers(alone(Asked((1, 2), 6, ends=frozenset()), False))


def test_without_it_every_step_is_read_at_once() -> None:
    model = DeferredModel(LIMITS, 40)
    loop = loop_of(model, runs_ahead=False)
    (request,) = Asked((1, 2), 6, ends=frozenset()).sequences()
    loop.add(request)
    while not request.finished:
        loop.step()
    assert model.log == ["choose"] * 6
    assert loop.renewed()._ahead is None


def test_a_prompt_that_arrives_joins_after_the_step_under_way() -> None:
    model = DeferredModel(LIMITS, 40)
    loop, _ = started(model, Asked((1, 2), 20, ends=frozenset()))
    for _ in range(4):
        loop.step()
    loop.add(Asked((7, 8, 9), 3, ends=frozenset()).sequences()[0])
    model.log.clear()
    assert [len(loop.step().chunks) for _ in range(2)] == [0, 1]
    assert model.log == ["read", "choose"]


def test_waiting_requests_without_a_seat_do_not_stop_it() -> None:
    model = DeferredModel(LIMITS, 40)
    asked = [Asked((n, 2), 12, ends=frozenset()) for n in range(5)]
    loop, requests = started(model, *asked)
    while loop.scheduler.waiting and not any(request.finished for request in requests):
        loop.step()
    assert model.log.count("fed") >= 8
    while not loop.scheduler.idle:
        loop.step()
    for request, question in zip(requests, asked, strict=True):
        assert answers([request]) == answers(alone(question, False))


def test_a_full_pool_stops_it_and_nothing_is_lost() -> None:
    model = DeferredModel(LIMITS, 8)
    asked = [Asked((n, 2, 5), 20, ends=frozenset(), shares=False) for n in range(3)]
    loop, requests = started(model, *asked)
    while not loop.scheduler.idle:
        loop.step()
    assert loop.scheduler.preemptions and "fed" in model.log
    for request, question in zip(requests, asked, strict=True):
        assert answers([request]) == answers(alone(question, False))
    assert loop.pool.used == 0


def test_a_step_that_nobody_needs_any_more_is_dropped() -> None:
    model = DeferredModel(LIMITS, 40)
    loop, (request,) = started(model, Asked((1, 2), 20, ends=frozenset()))
    for _ in range(4):
        loop.step()
    loop.drop(request.origin)
    model.log.clear()
    assert loop.scheduler.idle and loop.pool.used == 0
    assert not loop.step()
    assert not model.log
    (other,) = Asked((1, 2, 9), 5).sequences()
    loop.add(other)
    while not other.finished:
        loop.step()
    assert answers([other]) == answers(alone(Asked((1, 2, 9), 5), False))


def test_windows_stop_it_only_where_a_block_begins() -> None:
    model = model_of(40, window=6)
    loop, (request,) = started(model, Asked((1, 2), 20, ends=frozenset()))
    while not request.finished:
        loop.step()
    assert answers([request]) == answers(alone(Asked((1, 2), 20, ends=frozenset()), False, 6))
    # Steps begin a block at positions 4, 8, 12, 16 and 20, and are not fed.
    assert model.log.count("queue") == 6 and model.log.count("fed") == 13


def test_a_token_that_the_host_must_choose_stops_it_for_a_while() -> None:
    model = model_of(60, odd=True)
    with patch.object(run_ahead, "REST_STEPS", 3):
        loop, (request,) = started(model, Asked((1, 2), 24, seed=1, ends=frozenset()))
        while not request.finished:
            loop.step()
    assert not request.error and answers([request]) == answers(alone(Asked((1, 2), 24, seed=1, ends=frozenset()), True))
    # The step whose logits are needed runs again, then the queued one, and at least two are not followed.
    _, _, later = " ".join(model.log).partition("fed read choose queue read queue read queue read queue ")
    assert later.startswith("read") and "queue fed read fed" in later


def test_requests_that_show_their_logits_are_not_queued() -> None:
    model = DeferredModel(LIMITS, 40)
    asked = Asked((1, 2), 5, ends=frozenset(), logprobs=0), Asked((1, 4), 5, ends=frozenset(), penalty=1.3)
    loop, requests = started(model, *asked)
    while not loop.scheduler.idle:
        loop.step()
    assert not {"fed", "queue"} & set(model.log)
    for request, question in zip(requests, asked, strict=True):
        assert answers([request]) == answers(alone(question, False))


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", range(2, 11))
def test_a_failed_step_is_computed_again(error: BaseException, call: int) -> None:
    model = DeferredModel(LIMITS, 40, fault=(call, error))
    asked = [Asked((1, 2), 9), Asked((4, 2, 6), 9, seed=5)]
    loop, requests = started(model, *asked)
    failures = 0
    while not loop.scheduler.idle:
        try:
            loop.step()
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
            assert loop.recover()
    assert failures == 1
    for request, question in zip(requests, asked, strict=True):
        assert answers([request]) == answers(alone(question, False))


ASKED = st.builds(
    Asked,
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=14).map(tuple),
    output=st.integers(1, 16),
    seed=st.none() | st.integers(0, 9),
    choices=st.sampled_from([1, 1, 1, 1, 3]),
    penalty=st.sampled_from([1.0] * 8 + [1.2]),
    logprobs=st.sampled_from([None] * 8 + [1]),
    expires=st.sampled_from([False] * 6 + [True]),
    shares=st.booleans(),
)
# What happens between two steps: a request comes, one is dropped, deadlines are looked at, or nothing.
EVENTS = st.lists(
    st.one_of(ASKED, st.tuples(st.just("drop"), st.integers(0, 9)), st.just("expire"), st.integers(1, 6)), max_size=24
)


@settings(max_examples=80, deadline=None)
@given(
    events=EVENTS,
    blocks=st.integers(8, 24),
    odd=st.booleans(),
    window=st.sampled_from([0, 0, 6]),
    rest=st.sampled_from([0, 2]),
)
def test_answers_are_those_of_each_request_alone(
    events: list[Any], blocks: int, odd: bool, window: int, rest: int
) -> None:
    with patch.object(run_ahead, "REST_STEPS", rest):
        check_answers(events, blocks, odd, window)


def check_answers(events: list[Any], blocks: int, odd: bool, window: int) -> None:
    loop = loop_of(model_of(blocks, odd=odd, window=window))
    served: list[tuple[Asked, list[Generation]]] = []
    dropped: set[int] = set()
    for event in events:
        if isinstance(event, Asked):
            served.append((event, event.sequences()))
            loop.add(served[-1][1][0])
        elif event == "expire":
            loop.expire()
        elif isinstance(event, int):
            for _ in range(event):
                loop.step()
        elif served:
            dropped.add(event[1] % len(served))
            loop.drop(served[event[1] % len(served)][1][0].origin)
    for _ in range(2000):
        if loop.scheduler.idle:
            break
        loop.step()
    assert loop.scheduler.idle
    assert loop.pool.used == 0
    for index, (asked, sequences) in enumerate(served):
        expected = alone(asked, odd, window)
        # Choices end when one of them fails, wherever the others are.
        fails = asked.choices > 1 and any(sequence.error for sequence in (*expected, *sequences))
        for own, other in zip(sequences, expected, strict=True):
            if index in dropped or own.finish_reason == "deadline" or fails:
                count = min(len(own.output), len(other.output)) if fails else len(own.output)
                assert own.output[:count] == other.output[:count]
            else:
                assert answers([own]) == answers([other])
