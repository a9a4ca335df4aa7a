"""Kernels keep to the budgets of their machine code, except what is listed, and the list only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernels.attention import paged_decode
from llmc.codegen.triton.kernels.experts import expert_tile
from llmc.codegen.triton.kernels.products import coded_gemv, coded_narrow, dense_gemv
from llmc.codegen.triton.machine_code.budget import Budget
from llmc.codegen.triton.machine_code.budget_table import budgets
from llmc.codegen.triton.machine_code.figures import KernelCode
from tests.codegen.triton.machine_code.budget_cases import CASES
from tests.codegen.triton.machine_code.missed_budgets import GPUS, allowed, missed
from tests.codegen.triton.offline_compile import OLDER_TRITON
from tests.gpu_target import gpu_target

# Compiled for these by other quick tests as well.
_QUICK = {("product", "h100"), ("product of int4", "h100"), ("attention", "h100"), ("rms_norm", "b200")}
_PAIRS = [
    pytest.param(case, gpu, marks=() if (case, gpu) in _QUICK else pytest.mark.slow) for case in CASES for gpu in GPUS
]


@pytest.mark.skipif(OLDER_TRITON, reason="the list is of what Triton 3.9 compiles")
@pytest.mark.parametrize(("case", "gpu"), _PAIRS)
def test_only_what_is_listed_misses_a_budget(case: str, gpu: str, workers: Workers, tmp_path: Path) -> None:
    target = gpu_target(gpu)
    misses, without = missed(case, target, workers, tmp_path)
    assert not without, "a kernel without a budget"
    listed = allowed(case, target)
    assert misses == listed, (
        "if figures became better, shorten missed_budgets.json: "
        "python -m tests.codegen.triton.machine_code.missed_budgets prints it"
    )


def test_limits_name_figures_and_reasons() -> None:
    for budget in budgets().values():
        for limit in budget.all_limits:
            assert isinstance(getattr(KernelCode, limit.figure, None), property), limit.figure
            assert (limit.at_most is None) != (limit.at_least is None)
            assert limit.reason


def test_streams_are_pointers_of_the_kernel() -> None:
    for module in (paged_decode, coded_gemv, coded_narrow, dense_gemv, expert_tile):
        for budget in (value for value in vars(module).values() if isinstance(value, Budget)):
            function = getattr(module, budget.function)
            assert set(budget.streams) <= set(function.arg_names)
