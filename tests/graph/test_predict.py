"""The prediction's formula, and what it reads from a program."""

from __future__ import annotations

import pytest

from llmc.graph.cost import StepShape
from llmc.graph.predict import LaunchCost, Rates, gpu_rates, launch_costs, predict_launch, predict_step
from llmc.program import Affine, Launch, Limits, Origin, Program, RowCount, RowRange
from llmc.targets import GpuTarget, resolve_target

RATES = Rates(bandwidth=100.0, multiply={"F32": 10.0, "BF16": 50.0}, pack=20.0, launch=0.5, serial=0.25, measured=True)
STEP = StepShape.decode(requests=2, context=8)


def test_longer_plus_a_part_of_the_shorter() -> None:
    memory_bound = LaunchCost("100*T + 100", "10*T", "0", "F32")  # 3 s of transfer, 2 s of arithmetic
    assert predict_launch(memory_bound, STEP, RATES) == pytest.approx(0.5 + 3 + 0.25 * 2)
    compute_bound = LaunchCost("100", "C*10", "10*T", "BF16")  # 1 s, 3.2 s, 1 s of packing
    assert predict_launch(compute_bound, STEP, RATES) == pytest.approx(0.5 + 1 + 3.2 + 0.25 * 1)


def test_a_step_is_the_launches_that_it_has() -> None:
    product: dict[str, str | int | float | bool | None] = {"in": 64, "out": 32, "tokens": "T"}
    launches = (
        launch("llmc_linear_bf16", product),
        launch("loop_0_round_bf16", {"rows": "T"}),
        launch("llmc_kv_write_f32_bf16", {"tokens": "T"}),
        launch("llmc_linear_bf16", product, RowRange(RowCount.TOKENS, 100, None)),
    )
    limits = Limits(16, 4, 4, 32, 8)
    program = Program(limits, 10, Affine(), Affine(), (), (), (), launches)
    costs = launch_costs(program)
    assert [(cost.packed, cost.dtype) for cost in costs] == [
        ("64*T", "BF16"),
        ("0", "F32"),
        ("0", "F32"),
        ("64*T", "BF16"),
    ]
    expected = sum(predict_launch(cost, STEP, RATES) for cost in costs[:3])
    assert predict_step(program, STEP, RATES) == pytest.approx(expected)


def test_a_gpu_has_its_data_sheet() -> None:
    target = resolve_target("h100")
    assert isinstance(target, GpuTarget)
    rates = gpu_rates(target)
    assert rates.bandwidth == target.bandwidth
    assert not rates.measured
    assert predict_launch(LaunchCost("3350000000000", "0", "5*T", "BF16"), STEP, rates) == pytest.approx(1.0)


def test_steps_count_positions_and_pairs() -> None:
    decode = StepShape.decode(requests=4, context=100)
    assert (decode.tokens, decode.context, decode.pairs) == (4, 400, 400)
    assert StepShape.prefill(5).pairs == 15


def launch(kernel: str, arguments: dict[str, str | int | float | bool | None], only: RowRange | None = None) -> Launch:
    return Launch(kernel, arguments, Origin((), None, None), "8*T", "2*T", (), only)
