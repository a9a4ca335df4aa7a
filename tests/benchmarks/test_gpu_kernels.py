"""Kernels are measured on data that the GPU's L2 cache does not hold; no GPU is needed to see that they take turns."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import in_turn, sets_past_cache
from llmc.codegen.triton.kernels.rows.select_rows import select_rows
from tests.codegen.triton.tensor_call import TensorCall
from tests.gpu_target import gpu_target


def test_sets_of_arguments_take_turns() -> None:
    seen: list[int] = []
    run = in_turn([partial(seen.append, index) for index in range(3)])
    for _ in range(7):
        run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_together_they_are_several_times_the_cache() -> None:
    l2 = 50 * 10**6
    one_request = 2 * 8192 * 8 * 128 * 2
    assert one_request < l2 < 4 * l2 <= one_request * sets_past_cache(one_request, l2) < 5 * l2
    assert sets_past_cache(10**9, l2) == 1


def test_every_candidate_runs_on_every_set() -> None:
    rows, calls = torch.tensor([2, 0], dtype=torch.int32), []
    for value in (1.0, 2.0):
        x = torch.full((3, 8), value)
        calls.append(TensorCall(select_rows, (x, rows), (x[:2],), "cpu", in_place=False))
    runs = kernels._candidates(select_rows, calls, gpu_target("h100"))
    assert list(runs) == ["llmc"]
    for done, call in enumerate(calls):
        assert not torch.isfinite(call.results[0]).any(), done
        runs["llmc"]()
        assert torch.equal(call.results[0], torch.full((2, 8), done + 1.0))
