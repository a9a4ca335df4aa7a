"""How many drafts there are, from what steps take and how often drafts come true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import mul

import pytest

from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.gate import Gate
from llmc.runtime.speculation.step_times import StepTimes


@dataclass
class Outcome:
    """counts: drafts by step. time: of all steps, in steps without drafts; tokens: that each request got."""

    counts: list[int]
    time: float
    tokens: float

    @property
    def speed(self) -> float:
        """Of that without drafts."""
        return self.tokens / self.time


def settled(
    gate: Gate,
    requests: int,
    seconds: Callable[[int], float],
    right: float,
    steps: int = 400,
    *,
    drafting: float = 0.0,
    depth: int | None = None,
) -> Outcome:
    """So many steps of an engine that takes so long for so many tokens, and of a drafter that takes `drafting` for a
    draft of each. depth: of its trees."""
    counts, time, tokens = [], 0.0, 0.0
    for step in range(steps):
        count = gate.drafts(requests, 512)
        counts.append(count)
        gained = requests
        for request in range(requests if count else 0):
            accepted, deepest = 0, min(count, depth or count)
            # A fixed sequence, right as often as asked.
            while accepted < deepest and ((step * 7919 + request * 104729 + accepted * 31) % 1000) / 1000 < right:
                accepted += 1
            gate.note_drafts(count, draft(count, deepest), accepted)
            gained += accepted
        took, made = seconds(requests * (1 + count)), count * drafting
        if count:
            gate.note_drafting(requests, count, made)
            gate.note_drafted(requests, requests * (1 + count), gained, took, made)
        elif gate.wants_time:
            gate.note_plain(requests, took)
        time += (took + made) / seconds(requests)
        tokens += gained / requests
    return Outcome(counts, time, tokens)


def draft(count: int, depth: int) -> Draft:
    """A chain, or a tree of a chain and leaves if it is less deep."""
    parents = None if depth == count else [*(i - 1 if i else None for i in range(depth)), *[None] * (count - depth)]
    return Draft(list(range(count)), parents)


def memory_bound(tokens: int) -> float:
    """As long for one token as for ten, then in proportion."""
    return max(1.0, tokens / 10)


def test_good_drafts_pay_for_one_request_and_not_for_many() -> None:
    assert settled(Gate(4), 1, memory_bound, 0.8).counts[-50:] == [4] * 50
    many = settled(Gate(4), 32, memory_bound, 0.8, 2000)
    assert sum(many.counts[-500:]) <= 32, "tried again now and then, a few steps each"
    assert many.speed > 0.98


def test_as_many_drafts_as_are_free() -> None:
    """Three requests have room for six drafts in ten tokens: two each."""
    counts = settled(Gate(8), 3, lambda tokens: 1.0 if tokens <= 9 else tokens / 3, 0.8).counts
    assert set(counts[-40:]) == {2}


def test_random_drafts_end_soon_and_cost_little() -> None:
    outcome = settled(Gate(4), 1, lambda tokens: 1.0 + 0.02 * tokens, 0.0, 2000)
    assert 0 in outcome.counts[4:32]
    assert outcome.speed > 0.99
    assert settled(Gate(4), 1, lambda tokens: 1.0 + 0.05 * tokens, 0.0, 256).speed > 0.97


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("right", [0.0, 0.6])
@pytest.mark.parametrize("drafting", [0.0, 0.4])
def test_drafts_lose_two_hundredths_at_the_most(requests: int, right: float, drafting: float) -> None:
    """In the long run, whatever they cost and however wrong what was predicted is."""
    for prior in (float, lambda tokens: 1.0, memory_bound):
        gate = Gate(4, prior, partial(mul, 0.01))
        assert settled(gate, requests, memory_bound, right, 2000, drafting=drafting).speed > 0.98


def test_drafts_whose_parts_are_measured_wrong_end_all_the_same() -> None:
    """Each seems to take no time, and takes as long as a step: only how long all takes together shows it."""
    gate = Gate(4)
    counts = []
    for _ in range(4000):
        count = gate.drafts(1, 512)
        counts.append(count)
        if count:
            gate.note_drafts(count, draft(count, count), 1)
            gate.note_drafting(1, count, 0.0)
            gate.note_drafted(1, 1 + count, 2, 1.0, 2.0)
        elif gate.wants_time:
            gate.note_plain(1, 1.0)
    assert 10 < sum(map(bool, counts)) < 80


def test_drafts_come_again_when_load_falls_and_when_they_come_true() -> None:
    gate = Gate(4)
    assert settled(gate, 64, memory_bound, 0.9).counts[-1] == 0
    assert settled(gate, 1, memory_bound, 0.9).counts[-1] == 4
    assert settled(gate, 1, memory_bound, 0.0).counts[-1] == 0
    assert settled(gate, 1, memory_bound, 0.9, 2000).counts[-1] == 4


def test_a_step_that_was_held_up_counts_little() -> None:
    gate = Gate(4)
    settled(gate, 1, memory_bound, 0.8)
    before = gate.seconds(1, 4)
    gate.note_drafted(1, 5, 4, 1000.0, 0.0)
    after = gate.seconds(1, 4)
    assert before is not None and after == pytest.approx(1.2 * before)
    assert gate.drafts(1, 512) == 4


def test_a_size_that_was_slow_once_is_measured_again() -> None:
    gate = Gate(4)
    gate.note_plain(1, 1.0)
    for tokens in (2, 3, 4, 5):
        gate.note_drafted(1, tokens, tokens, 10.0, 0.0)
    counts = settled(gate, 1, memory_bound, 0.9, 6000).counts
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


def test_steps_of_sizes_alike_count_as_measured() -> None:
    times = StepTimes()
    for size in (8, 9, 20):
        times.note(size, 1.0)
    assert [times.times(size) for size in (1, 8, 10, 16, 25, 26)] == [0, 2, 2, 1, 1, 0]
    times.forget()
    assert times.times(8) == 0 and times.seconds(8) is None


def test_what_is_predicted_not_to_pay_is_not_tried() -> None:
    """From the first step on after two without drafts."""
    steep, flat = Gate(4, prior=float), Gate(4, prior=lambda tokens: 10.0 + tokens)
    assert settled(steep, 32, memory_bound, 0.7, 100).counts == [0] * 100
    assert settled(flat, 1, memory_bound, 0.7, 3).counts == [0, 0, 4]


def test_a_prediction_that_was_wrong_is_found_out() -> None:
    """Both ways: by steps with drafts, and by the few that are tried."""
    assert settled(Gate(4, prior=float), 1, memory_bound, 0.9, 2000).counts[-1] == 4
    assert settled(Gate(4, prior=lambda tokens: 1.0), 32, memory_bound, 0.8).counts[-1] == 0


def test_random_drafts_end_though_the_steps_without_were_held_up() -> None:
    """They are not measured again as long as there are drafts; but they cannot take longer than those with drafts."""
    gate = Gate(4, prior=lambda tokens: 10.0 + tokens)
    for _ in range(2):
        gate.note_plain(1, 9.0)
    counts = settled(gate, 1, lambda tokens: 1.0 + 0.02 * tokens, 0.0, 200).counts
    assert 0 in counts[:64] and sum(counts[64:]) <= 8


def test_steps_without_drafts_are_measured_anew() -> None:
    """They have become as fast as none knew: drafts that paid pay no more."""
    gate = Gate(4)
    assert settled(gate, 1, memory_bound, 0.6).counts[-1] == 4
    counts = settled(gate, 1, lambda tokens: 0.2 if tokens == 1 else 1.0, 0.6, 3000).counts
    assert sum(map(bool, counts[-1000:])) < 50


def test_what_the_drafter_takes_counts() -> None:
    """A draft that takes longer than a step never pays, however right it is; one that takes a tenth does."""
    for seconds, pays in ((1.1, False), (0.1, True)):
        counts = settled(Gate(4), 1, memory_bound, 0.6, 60, drafting=seconds).counts
        assert (counts[-1] > 0) == pays


def test_what_the_drafter_takes_is_predicted_too() -> None:
    """In the first engine's measure: nothing is known of the seconds of the second."""
    for share, pays in ((0.9, False), (0.1, True)):
        gate = Gate(4, prior=lambda tokens: 7.0, draft_prior=partial(mul, 7.0 * share))
        for _ in range(2):
            gate.note_plain(1, 0.02)
        assert (gate.drafts(1, 512) > 0) == pays


def test_there_is_never_more_than_a_step_has_room_for() -> None:
    for requests, most in ((1, 8), (4, 3), (8, 1), (16, 0)):
        gate = Gate(8)
        for _ in range(2):
            gate.note_plain(requests, 1.0)
        assert gate.drafts(requests, 16) == most


def test_of_a_tree_its_depth_counts() -> None:
    """Twelve drafts that are two deep give less than three tokens, and do not pay where twelve in a chain would."""
    counts = settled(Gate(12), 1, lambda tokens: 0.9 + 0.1 * tokens, 1.0, depth=2).counts
    assert set(counts[-40:]) == {2}


def test_drafts_that_are_not_made_bring_nothing_and_cost_little() -> None:
    """A drafter that finds something in every fifth step: its steps are mostly of one token."""
    gate, counts = Gate(4), []
    for step in range(400):
        count = gate.drafts(1, 512)
        counts.append(count)
        if count:
            made = count if step % 5 == 0 else 0
            gate.note_drafts(count, draft(made, made), made)
            gate.note_drafted(1, 1 + made, 1 + made, 1.0 + 0.1 * made, 0.01)
        elif gate.wants_time:
            gate.note_plain(1, 1.0)
    assert counts[-1] == 4


def test_what_the_drafter_reads_once_ends_nothing_and_puts_trials_off() -> None:
    """A hundred steps' time, which good drafts bring in again."""
    gate = Gate(4)
    for _ in range(2):
        gate.note_plain(1, 1.0)
    gate.note_drafted(1, 5, 1, 1.0, 100.0, has_read=True)
    assert settled(gate, 1, memory_bound, 0.8, 100).counts == [4] * 100
    bad = settled(gate, 1, memory_bound, 0.0, 100, drafting=0.5)
    assert 0 in bad.counts
    gate.note_drafted(1, 5, 1, 1.0, 100.0, has_read=True)
    assert not any(settled(gate, 1, memory_bound, 0.0, 2000).counts)
