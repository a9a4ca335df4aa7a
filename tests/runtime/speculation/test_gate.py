"""How many drafts there are, from what steps take and how often drafts come true."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import mul

import pytest

from llmc.runtime.speculation.gate import Gate
from llmc.runtime.speculation.step_times import StepTimes


def settled(gate: Gate, requests: int, seconds: Callable[[int], float], right: float, steps: int = 400) -> list[int]:
    """The numbers of drafts in so many steps of an engine that takes so long for so many tokens."""
    found = []
    for step in range(steps):
        count = gate.drafts(requests, 512)
        found.append(count)
        for request in range(requests if count else 0):
            accepted = 0
            # A fixed sequence, right as often as asked.
            while accepted < count and ((step * 7919 + request * 104729 + accepted * 31) % 1000) / 1000 < right:
                accepted += 1
            gate.note_drafts(count, accepted, count)
        gate.note_step(requests * (1 + count), seconds(requests * (1 + count)))
    return found


def memory_bound(tokens: int) -> float:
    """As long for one token as for ten, then in proportion."""
    return max(1.0, tokens / 10)


def test_good_drafts_pay_for_one_request_and_not_for_many() -> None:
    assert settled(Gate(4), 1, memory_bound, 0.8)[-50:] == [4] * 50
    many = settled(Gate(4), 32, memory_bound, 0.8)
    assert sum(many[-200:]) <= 16, "tried again now and then, a few steps each"


def test_as_many_drafts_as_are_free() -> None:
    """Three requests have room for six drafts in ten tokens: two each."""
    counts = settled(Gate(8), 3, lambda tokens: 1.0 if tokens <= 9 else tokens / 3, 0.8)
    assert set(counts[-100:]) == {2}


def test_random_drafts_end_soon_and_cost_little() -> None:
    counts = settled(Gate(4), 1, lambda tokens: 1.0 + 0.02 * tokens, 0.0, 2000)
    assert 0 in counts[:64] and counts[:64].index(0) <= 32
    cost = sum(0.02 * count for count in counts) / (1.02 * len(counts))
    assert cost < 0.03
    assert sum(counts[:32]) < 64, "less and less of them"


def test_drafts_come_again_when_load_falls_and_when_they_come_true() -> None:
    gate = Gate(4)
    assert settled(gate, 64, memory_bound, 0.9)[-1] == 0
    assert settled(gate, 1, memory_bound, 0.9)[-1] == 4
    assert settled(gate, 1, memory_bound, 0.0)[-1] == 0
    assert settled(gate, 1, memory_bound, 0.9, 6000)[-1] == 4


def test_a_step_that_was_held_up_counts_little() -> None:
    gate = Gate(4)
    settled(gate, 1, memory_bound, 0.8)
    before = gate.seconds(1, 4)
    gate.note_step(5, 1000.0)
    after = gate.seconds(1, 4)
    assert before is not None and after == pytest.approx(1.2 * before)


def test_a_size_that_was_slow_once_is_measured_again() -> None:
    gate = Gate(4)
    gate.note_step(1, 1.0)
    for tokens in (2, 3, 4, 5):
        gate.note_step(tokens, 50.0)
    counts = settled(gate, 1, memory_bound, 0.9, 3000)
    assert counts[0] == 0 and counts[-1] == 4


@pytest.mark.parametrize(("tokens", "seconds"), [(2, 1.0), (4, 2.0), (6, 2.0), (8, 4.0), (100, 4.0)])
def test_steps_of_sizes_that_nobody_predicts_take_the_least_that_they_may(tokens: int, seconds: float) -> None:
    times = StepTimes()
    assert times.seconds(tokens) is None
    times.note(4, 2.0)
    times.note(8, 4.0)
    assert times.seconds(tokens) == seconds


@pytest.mark.parametrize(("tokens", "seconds"), [(2, 6.0), (4, 12.0), (5, 15.0), (6, 30.0), (8, 40.0), (100, 500.0)])
def test_predictions_are_corrected_by_the_nearest_size_that_was_measured(tokens: int, seconds: float) -> None:
    """Four tokens took three times as long as predicted, eight five times."""
    times = StepTimes(float)
    times.note(4, 12.0)
    times.note(8, 40.0)
    assert times.seconds(tokens) == seconds


def test_what_is_predicted_not_to_pay_is_not_tried() -> None:
    """From the first step after one without drafts."""
    steep = Gate(4, prior=float)
    steep.note_step(32, 1.0)
    assert steep.drafts(32, 512) == 0
    flat = Gate(4, prior=lambda tokens: 10.0 + tokens)
    flat.note_step(1, 1.0)
    assert flat.drafts(1, 512) == 4


def test_a_prediction_that_was_wrong_is_found_out() -> None:
    """Both ways: by steps with drafts, and by the few that are tried."""
    assert settled(Gate(4, prior=float), 1, memory_bound, 0.9, 2000)[-1] == 4
    assert settled(Gate(4, prior=lambda tokens: 1.0), 32, memory_bound, 0.8)[-1] == 0


def test_random_drafts_end_though_the_step_without_was_held_up() -> None:
    """It is not measured again as long as there are drafts; but it cannot take longer than one with drafts."""
    gate = Gate(4, prior=lambda tokens: 10.0 + tokens)
    gate.note_step(1, 9.0)
    counts = settled(gate, 1, memory_bound, 0.0, 200)
    assert 0 in counts[:32] and sum(counts[64:]) <= 8


def test_what_the_drafter_takes_counts() -> None:
    """A draft that takes longer than a step never pays, however right it is; one that takes a tenth does."""
    for seconds, pays in ((1.1, False), (0.1, True)):
        gate = Gate(4)
        for _ in range(50):
            count = gate.drafts(1, 512)
            if count:
                gate.note_drafts(count, min(count, 1), count)
                gate.note_drafting(1, count, count * seconds)
            gate.note_step(1 + count, memory_bound(1 + count))
        assert (gate.drafts(1, 512) > 0) == pays


def test_what_the_drafter_takes_is_predicted_too() -> None:
    """In the first engine's measure: nothing is known of the seconds of the second."""
    for share, pays in ((0.9, False), (0.1, True)):
        gate = Gate(4, prior=lambda tokens: 7.0, draft_prior=partial(mul, 7.0 * share))
        gate.note_step(1, 0.02)
        assert (gate.drafts(1, 512) > 0) == pays


def test_there_is_never_more_than_a_step_has_room_for() -> None:
    gate = Gate(8)
    assert [gate.drafts(requests, 16) for requests in (1, 4, 8, 16)] == [8, 3, 1, 0]


def test_of_a_tree_its_depth_counts() -> None:
    """Twelve drafts that are two deep give less than three tokens, and do not pay where twelve in a chain would."""
    gate = Gate(12)
    for _ in range(300):
        count = gate.drafts(1, 512)
        if count:
            gate.note_drafts(count, min(count, 2), min(count, 2))
        gate.note_step(1 + count, 1.0 + 0.1 * count)
    assert gate.drafts(1, 512) == 2
