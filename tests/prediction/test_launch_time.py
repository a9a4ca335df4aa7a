"""The prediction's formula, and what it reads from a program."""

from __future__ import annotations

import pytest

from llmc.prediction.launch_cost import LaunchCost, launch_costs
from llmc.prediction.launch_time import predict_launch, predict_step
from llmc.prediction.rates import KindRates, Rates, Reach, gpu_rates
from llmc.prediction.step_shape import StepShape
from llmc.program import Affine, Launch, Limits, Origin, Program, RowCount, RowRange
from llmc.program.launch_arguments import Argument, Count
from tests.gpu_target import gpu_target

REACH = (Reach(1, 0.25), Reach(4, 0.8), Reach(8, 1.0))
KINDS = {
    "F32": KindRates(10.0),
    "BF16": KindRates(50.0, REACH, pack=20.0, serial=0.25),
    "lookup": KindRates(10.0, bandwidth=25.0),
}
RATES = Rates(bandwidth=100.0, kinds=KINDS, launch=0.5, measured=True)
STEP = StepShape.decode(requests=2, context=8)
Arguments = dict[str, Argument]


def test_longer_plus_a_part_of_the_shorter() -> None:
    # 3 s of transfer; 10 flops at 50 · 0.4, since two rows take 4 + (5 - 4) / 3 as long as one at its best would
    memory_bound = LaunchCost("100*T + 100", "5*T", "0", "BF16", is_shared=True)
    two_rows = 10 / 50 * (4 + 1 / 3) / 2
    assert predict_launch(memory_bound, STEP, RATES) == pytest.approx(0.5 + 3 + 0.25 * two_rows)
    compute_bound = LaunchCost("100", "C*10", "10*T", "BF16", is_shared=True)
    arithmetic = 160 / 50 * (4 + 1 / 3) / 2
    assert predict_launch(compute_bound, STEP, RATES) == pytest.approx(0.5 + 1 + arithmetic + 0.25 * 1)


def test_a_rank_with_one_thread_starts_no_others() -> None:
    assert RATES.of_a_rank(1, 8) == RATES
    own = {threads: RATES.of_a_rank(2, threads) for threads in (2, 3)}
    assert (own[2].launch, own[3].launch) == (0.0, 0.5)
    assert own[2].bandwidth == own[3].bandwidth == 50.0 and own[2].kinds["F32"].multiply == 5.0


@pytest.mark.parametrize(("rows", "share"), [(0.5, 0.125), (1, 0.25), (2.5, 0.5555556), (4, 0.8), (8, 1.0), (99, 1.0)])
def test_more_rows_reach_more(rows: float, share: float) -> None:
    assert KINDS["BF16"].share(rows) == pytest.approx(share)
    assert KINDS["F32"].share(rows) == 1.0


def test_rows_are_those_of_one_part_and_depth_comes_in_whole_tiles() -> None:
    cost = LaunchCost("0", "C*10", "0", "BF16", rows="2*T", parts="R", depth="C", depth_tile=8)
    decode = StepShape.decode(requests=3, context=12)  # two rows a request, whose 12 keys take as long as 16
    assert predict_launch(cost, decode, RATES) == pytest.approx(0.5 + 36 * 16 / 12 * 10 / 50 * (4 + 1 / 3) / 2)


def test_what_does_not_lie_together_is_read_at_a_pace_of_its_own() -> None:
    shape = StepShape.decode(1, 1)
    assert predict_launch(LaunchCost("100", "0", "0", "lookup"), shape, RATES) == pytest.approx(4.0)


def test_nothing_is_shared_for_a_single_token_but_products() -> None:
    shape = StepShape.decode(1, 1)
    assert predict_launch(LaunchCost("100", "0", "0", "F32"), shape, RATES) == pytest.approx(1.0)
    assert predict_launch(LaunchCost("100", "0", "0", "F32", is_shared=True), shape, RATES) == pytest.approx(1.5)


def test_a_step_is_the_launches_that_it_has() -> None:
    product: Arguments = {"in": 64, "out": 32, "tokens": Count.TOKENS}
    codes: Arguments = {"format": "int4", "x_format": "int8", "has_zeros": True, "group": 32, "scale_type": "bf16"}
    launches = (
        launch("linear BF16", product),
        launch("loop", {"rows": Count.TOKENS}),
        launch("kv_write F32 BF16", {"tokens": Count.TOKENS}),
        launch("quantized_lm_head F32", {**product, **codes, "tokens": Count.LOGIT_ROWS}),
        launch("quantized_linear F32", {**product, **codes, "x_format": "none", "has_zeros": False}),
        launch("paged_attention BF16 int8", {"heads": 12, "kv_heads": 4}),
        launch("embedding_panels BF16", {"tokens": Count.TOKENS, "channels": 8}),
        launch("linear BF16", product, RowRange(RowCount.TOKENS, 100, None)),
    )
    limits = Limits(16, 4, 4, 32, 8)
    program = Program(limits, 10, Affine(), Affine(), (), (), (), launches)
    costs = launch_costs(program)
    assert [(cost.packed, cost.kind, cost.rows, cost.parts) for cost in costs] == [
        ("64*T", "BF16", "T", "1"),
        ("0", "F32", "T", "1"),
        ("0", "F32", "T", "1"),
        ("64*L", "int4:asym·int8", "L", "1"),
        ("64*T", "int4·F32", "T", "1"),
        ("0", "attention bf16·int8", "3*T", "R"),
        ("0", "lookup", "T", "1"),
        ("64*T", "BF16", "T", "1"),
    ]
    expected = sum(predict_launch(cost, STEP, RATES) for cost in costs[:7])
    assert predict_step(program, STEP, RATES) == pytest.approx(expected)


def test_a_gpu_has_its_data_sheet() -> None:
    target = gpu_target("h100")
    rates = gpu_rates(target)
    assert rates.bandwidth == target.bandwidth
    assert not rates.measured
    assert predict_launch(LaunchCost("3350000000000", "0", "5*T", "BF16"), STEP, rates) == pytest.approx(1.0)


def test_steps_count_positions_and_pairs() -> None:
    decode = StepShape.decode(requests=4, context=100)
    assert (decode.tokens, decode.context, decode.pairs) == (4, 400, 400)
    assert StepShape.prefill(5).pairs == 15


def launch(kernel: str, arguments: Arguments, only: RowRange | None = None) -> Launch:
    family, *dtypes = kernel.split()
    return Launch(kernel, family, tuple(dtypes), arguments, Origin((), None, None), "8*T", "2*T", (), only)
