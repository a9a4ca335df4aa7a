"""The scheduler's steps on a virtual clock, with steps whose seconds are known."""

from __future__ import annotations

import pytest

from llmc.prediction.step_shape import StepShape
from llmc.program import Limits
from llmc.simulation.load import Arrival
from llmc.simulation.replica import Replica

LIMITS = Limits(max_batch_tokens=8, max_sequences=4, max_logit_rows=4, max_model_len=64, block_size=8)


def per_token(step: StepShape) -> float:
    """A second a token."""
    return float(step.tokens)


def test_a_request_alone() -> None:
    shapes: list[StepShape] = []

    def noted(step: StepShape) -> float:
        shapes.append(step)
        return per_token(step)

    replica = Replica(LIMITS, 16, noted)
    record = replica.add(Arrival(0.0, 10, 3))
    replica.run_until(float("inf"))
    # Its prompt in chunks of 8 and 2, then a token a step.
    assert record.pieces == [10.0, 11.0, 12.0] and record.ended == replica.now == 12.0
    assert record.output_tokens == 3 and replica.in_flight == 0 and replica.steps == 4
    assert shapes == [
        StepShape(tokens=8, logit_rows=0, requests=1, context=8, pairs=36),
        StepShape(tokens=2, logit_rows=1, requests=1, context=10, pairs=19),
        StepShape(tokens=1, logit_rows=1, requests=1, context=11, pairs=11),
        StepShape(tokens=1, logit_rows=1, requests=1, context=12, pairs=12),
    ]
    assert replica.most_blocks == 2


def test_a_step_that_has_begun_ends_before_others_begin() -> None:
    replica = Replica(LIMITS, 16, per_token)
    first = replica.add(Arrival(0.0, 8, 2))
    replica.run_until(3.0)
    assert replica.now == 8.0 and first.pieces == [8.0]
    second = replica.add(Arrival(3.0, 2, 1))
    replica.run_until(float("inf"))
    # One step has the last token of the first and the prompt of the second.
    assert first.pieces == [8.0, 11.0] and second.pieces == [11.0]
    assert second.first_token == 8.0


def test_an_idle_clock_goes_on() -> None:
    replica = Replica(LIMITS, 16, per_token)
    replica.run_until(5.0)
    record = replica.add(Arrival(5.0, 1, 1))
    replica.run_until(float("inf"))
    assert record.pieces == [6.0]


def test_a_small_cache_preempts() -> None:
    def served(blocks: int) -> tuple[Replica, float]:
        replica = Replica(LIMITS, blocks, per_token)
        records = [replica.add(Arrival(0.0, 4, 28)) for _ in range(3)]
        replica.run_until(float("inf"))
        assert [record.output_tokens for record in records] == [28] * 3
        return replica, replica.now

    (large, seconds), (small, longer) = served(32), served(8)
    assert large.preemptions == 0 < small.preemptions
    assert longer > seconds and small.most_blocks == 8


@pytest.mark.parametrize("blocks", [8, 32])
def test_it_is_the_same_every_time(blocks: int) -> None:
    def pieces() -> list[list[float]]:
        replica = Replica(LIMITS, blocks, lambda step: 0.5 + step.tokens + 0.01 * step.context)
        records = []
        for index in range(20):
            arrival = Arrival(3.0 * index, 5 + index % 3, 10)
            replica.run_until(arrival.arrival)
            records.append(replica.add(arrival))
        replica.run_until(float("inf"))
        return [record.pieces for record in records]

    assert pieces() == pieces()
