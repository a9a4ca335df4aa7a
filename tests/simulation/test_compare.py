"""Every division of the ranks under one load: what fits, what serves, and which is best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmc.errors import OptionError
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.hand_over import hand_over_seconds
from llmc.prediction.step_shape import StepShape
from llmc.program import Nearest, Program, RankLayout
from llmc.program.joined_program import HAND_OVER
from llmc.simulation.compare import Comparison, best_or_refuse, compare
from llmc.simulation.divisions import Division, division_of, divisions
from llmc.simulation.load import Arrival
from llmc.simulation.plot import plot_comparison
from llmc.simulation.pricing import Machine, step_seconds
from llmc.simulation.programs import model_programs, stages_of
from llmc.simulation.rank_memory import rank_memory
from llmc.simulation.serve import Refused, Served, serve
from llmc.targets import gpu_target

MODEL = Path(__file__).parents[2] / "examples" / "models" / "bard-6m"
ProgramOf = Callable[[RankLayout], Program]
H100 = gpu_target("h100")
MACHINE = Machine(H100, H100.memory_bytes)
LOAD = tuple(Arrival(0.0005 * index, 60, 8) for index in range(30))


@pytest.fixture(scope="module")
def program_of() -> Callable[[RankLayout], Program]:
    """For an H100, by layout."""
    options = parse_options({"max_model_len": 128, "max_sequences": 8})
    captured = capture(MODEL, options, may_lack_weights=True)
    return cache(model_programs(captured, default(), options, gpu_target("h100")).program)


@pytest.fixture(scope="module")
def comparison(program_of: ProgramOf) -> Comparison:
    return compare(divisions(4), program_of, MACHINE, LOAD, {})


def test_all_ranks_are_used() -> None:
    ways = divisions(8)
    assert len(ways) == 10 and len(set(ways)) == 10
    assert all(way.layout.ranks * way.replicas == 8 for way in ways)
    assert division_of(RankLayout(2, 2), 8) == Division(RankLayout(2, 2), 2)
    with pytest.raises(OptionError, match="8 ranks cannot be divided into replicas of 3"):
        division_of(RankLayout(3), 8)
    with pytest.raises(OptionError, match="there cannot be 0 ranks"):
        divisions(0)


def test_rows_between_stages_pass_through_the_host(program_of: ProgramOf) -> None:
    """A step of two stages takes as long as that of one, and the transfer of its rows."""
    step = StepShape.decode(requests=4, context=64)
    one, two = (
        step_seconds(program_of(layout), layout, MACHINE, 2)(step) for layout in (RankLayout(), RankLayout(1, 2))
    )
    (crossing,) = (launch for launch in program_of(RankLayout(1, 2)).launches if launch.family == HAND_OVER)
    transfer = hand_over_seconds(evaluate_expression(crossing.bytes_moved, step.values()) / 2)
    assert two == pytest.approx(one + transfer)
    # With more ranks than a machine has GPUs, rows pass over the link between machines.
    single = replace(H100, links=replace(H100.links, size=1))
    apart = step_seconds(program_of(RankLayout(1, 2)), RankLayout(1, 2), replace(MACHINE, target=single), 2)(step)
    sent = H100.links.between.send(evaluate_expression(crossing.bytes_moved, step.values()) / 2)
    assert apart == pytest.approx(one + sent) and sent != pytest.approx(transfer)


def test_every_request_is_served_in_every_division(comparison: Comparison) -> None:
    assert [str(served.division) for served in comparison.served] == [str(division) for division in divisions(4)]
    for outcome in comparison.served:
        assert outcome.summary.completed == 30 and outcome.summary.output_tokens == 240
        assert outcome.percentile("ttft", 0.5) <= outcome.percentile("ttft", 0.99)
        assert 0 < outcome.kv_used <= outcome.kv_tokens


def test_a_plot_has_a_line_from_the_median_to_the_99th_percentile(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plot_comparison(comparison, tmp_path / "plot.png", "four ranks")
    throughputs, latencies = drawn[0].axes
    lengths = [bar.get_width() for bar in throughputs.patches if isinstance(bar, Rectangle)]
    assert lengths == [outcome.summary.output_throughput for outcome in comparison.served]
    for lines, name in zip(latencies.collections[::2], ("ttft", "tpot"), strict=True):
        ends = [np.sort(np.asarray(line.vertices)[:, 0]).tolist() for line in lines.get_paths()]
        assert ends == [
            [outcome.percentile(name, 0.5), outcome.percentile(name, 0.99)] for outcome in comparison.served
        ]


def test_it_is_the_same_every_time(program_of: ProgramOf, comparison: Comparison) -> None:
    assert compare(divisions(4), program_of, MACHINE, LOAD, {}) == comparison


def test_the_best_has_the_most_tokens_or_the_most_good_requests(comparison: Comparison, program_of: ProgramOf) -> None:
    best = best_or_refuse(comparison, MACHINE)
    assert best.summary.output_throughput >= 0.98 * max(
        outcome.summary.output_throughput for outcome in comparison.served
    )
    strict = compare(divisions(4), program_of, MACHINE, LOAD, {"ttft": 1e-6})
    assert all(outcome.summary.goodput == 0 for outcome in strict.served)


def test_weights_and_caches_are_divided(program_of: ProgramOf) -> None:
    def memory(layout: RankLayout) -> tuple[int, int]:
        program = program_of(layout)
        memories = rank_memory(program, stages_of(program), H100.memory_bytes)
        assert len(memories) == layout.pipeline
        return sum(part.weights for part in memories), sum(sum(part.kv_groups) for part in memories)

    weights, kv_token = memory(RankLayout())
    for layout in (RankLayout(2, 1), RankLayout(1, 2), RankLayout(2, 2)):
        own, own_kv = memory(layout)
        # The first stage and the last both have the tied embedding.
        tied = (layout.pipeline - 1) * 4096 * 256 * 2
        assert own == pytest.approx((weights + tied) / layout.tensor, rel=0.01)
        assert own_kv == kv_token / layout.tensor


def test_what_does_not_fit_says_what_it_needs(program_of: ProgramOf) -> None:
    small = replace(MACHINE, memory=1_100_000_000)
    compared = compare((Division(RankLayout(), 1),), program_of, small, LOAD, {})
    assert isinstance(compared.outcomes[0], Served)
    tiny = replace(MACHINE, memory=1_076_000_000)
    (refused,) = compare((Division(RankLayout(), 1),), program_of, tiny, LOAD, {}).outcomes
    assert isinstance(refused, Refused) and "GB per rank of 1.076: weights 0.0" in refused.reason
    with pytest.raises(
        OptionError, match=r"no division of the ranks of h100 can serve this load: TP 1 × PP 1 × 1: needs"
    ):
        best_or_refuse(Comparison((refused,), {}), tiny)


def test_what_fits_is_named_where_nothing_that_was_asked_for_does(program_of: ProgramOf) -> None:
    """With the memory that two ranks need, one is told how many tokens it could have, and how many ranks do."""
    program = program_of(RankLayout(2))
    (needed,) = rank_memory(program, stages_of(program), H100.memory_bytes)
    two = replace(MACHINE, memory=needed.fixed + needed.cache(program, 128 // 16))
    compared = compare((Division(RankLayout(), 1),), program_of, two, LOAD, {})
    (refused,) = compared.outcomes
    assert isinstance(refused, Refused) and refused.reason.endswith("; no tokens would fit")
    assert compared.enough == 2
    with pytest.raises(OptionError) as caught:
        best_or_refuse(compared, two)
    assert "use 2 tensor ranks, which have enough memory," in str(caught.value.fix)
    assert isinstance(compare((Division(RankLayout(2), 1),), program_of, two, LOAD, {}).outcomes[0], Served)
    (alone,) = rank_memory(program_of(RankLayout()), stages_of(program_of(RankLayout())), H100.memory_bytes)
    half = replace(MACHINE, memory=alone.fixed + alone.cache(program_of(RankLayout()), 64 // 16))
    (refused,) = compare((Division(RankLayout(), 1),), program_of, half, LOAD, {}).outcomes
    assert isinstance(refused, Refused) and refused.reason.endswith("; 64 tokens would fit")


def test_layers_with_windows_hold_no_more_than_those(program_of: ProgramOf) -> None:
    """What a sequence takes, and the requests that wait for its windows."""
    plain, single = program_of(RankLayout()), Division(RankLayout(), 1)
    caches = tuple(replace(cache, group=int(layer > 0)) for layer, cache in enumerate(plain.caches))
    limits = replace(plain.limits, max_batch_tokens=16, max_model_len=512)
    program = replace(plain, limits=limits, caches=caches, policies=(Nearest(8),))
    (memory,) = rank_memory(program, stages_of(program), H100.memory_bytes)
    blocks = program.limits.blocks_for(program.limits.max_model_len)
    machine = replace(MACHINE, memory=memory.fixed + memory.cache(program, blocks))
    assert isinstance(serve(replace(plain, limits=limits), single, machine, LOAD, {}), Refused)
    served = serve(program, single, machine, LOAD, {})
    assert isinstance(served, Served) and served.kv_tokens == 512
    few = replace(memory, has=machine.memory - 1)
    assert "tokens would fit" in str(few.shortage(program, blocks))


def test_more_stages_than_layers_are_refused(program_of: ProgramOf) -> None:
    (refused,) = compare((Division(RankLayout(1, 64), 1),), program_of, MACHINE, LOAD, {}).outcomes
    assert isinstance(refused, Refused) and "cannot be cut into 64 stages" in refused.reason


def test_a_request_that_is_too_long_is_named(program_of: ProgramOf) -> None:
    with pytest.raises(OptionError, match="a request has 120 tokens and is to generate 9: more than 128"):
        compare((Division(RankLayout(), 1),), program_of, MACHINE, [Arrival(0.0, 120, 9)], {})


def test_slower_links_take_longer(program_of: ProgramOf) -> None:
    layout, step = RankLayout(2), StepShape.decode(requests=4, context=64)
    program = program_of(layout)
    nvlink = step_seconds(program, layout, MACHINE, 2)(step)
    library = step_seconds(program, layout, replace(MACHINE, custom=False), 2)(step)
    pcie = step_seconds(program, layout, replace(MACHINE, link=gpu_target("l4").links.within), 2)(step)
    assert nvlink < library < pcie
