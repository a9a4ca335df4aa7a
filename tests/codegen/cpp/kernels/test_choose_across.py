"""llmc_choose_across on several ranks gives what llmc_choose_rows does with whole rows, bit for bit."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmc.graph.ranks import OnRanks
from llmc.graph.ranks import call as call_on_ranks
from llmc.program.engine_structs import LlmcChooseRows, LlmcRanks
from llmc.runtime.memory import zeros
from llmc.runtime.sampling.row_choice import BEST, EVERY_TOKEN, RowChoice, RowChoices
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels
from tests.codegen.cpp.kernels.test_choose_rows import choose, random_rows
from tests.codegen.cpp.runnable_targets import QUICKLY_RUNNABLE, RUNNABLE

Rows = npt.NDArray[np.float32]
# What the padding of a rank's part holds; it stands for no token.
_PADDING = 1e30


def parts_of(logits: Rows, ends: list[int]) -> list[Rows]:
    """Of each rank, as wide as the widest."""
    width = max(stop - start for start, stop in pairwise([0, *ends]))
    parts = []
    for start, stop in pairwise([0, *ends]):
        part = np.full((len(logits), width), _PADDING, np.float32)
        part[:, : stop - start] = logits[:, start:stop]
        parts.append(part)
    return parts


def choose_across(
    target: CpuTarget, logits: Rows, choices: list[RowChoice], ends: list[int], threads: int = 1
) -> list[tuple[list[int], list[float]]]:
    """What each rank finds, all of them at once in threads of this process."""
    library, ranks, numbers = kernels(target), len(ends), RowChoices.of(choices)
    shared = zeros(library.llmc_ranks_bytes(ranks))
    stops = np.array(ends, np.int32)

    def one(rank: int, part: Rows) -> tuple[list[int], list[float]]:
        tokens, scores = np.full(len(part), -1, np.int32), np.zeros(len(part), np.float32)
        addresses = (array.ctypes.data for array in (*numbers.arrays().values(), tokens, scores))
        rows = LlmcChooseRows(len(part), 0, None, *addresses)
        place = LlmcRanks(rank, ranks, shared.ctypes.data, 0)
        values: dict[str, Any] = {
            "tokens": len(part),
            "width": part.shape[1],
            "ends": stops.ctypes.data,
            "x": (part.ctypes.data, part.shape[1]),
            "choices": ctypes.addressof(rows),
            "ranks": ctypes.addressof(place),
        }
        scratch = library.llmc_choose_rows_scratch(logits.shape[1])
        call(target, "choose_across", [], values, threads=threads, scratch=scratch)
        return tokens.tolist(), scores.tolist()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks), parts_of(logits, ends)))


def drawn(temperature: float, counter: int) -> RowChoice:
    return RowChoice(temperature, EVERY_TOKEN, 1.0, 0.0, -7, counter)


# Where ranks' parts end: within groups of noise and blocks, with one that has none, and with little.
ENDS = [[512, 1024], [500, 1000, 1300], [700, 1400, 2100, 2777], [40, 40, 41], [3, 5, 6, 7], [4097, 8193]]


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_tokens_are_those_of_whole_rows(target: CpuTarget, ends: list[int]) -> None:
    """Of rows that take the likeliest and rows that draw, at temperatures that change next to nothing and all."""
    temperatures = (0.0, 1.0, 0.05, 30.0, 1e-6, 1e6, 0.7, 2.0)
    choices = [BEST if not t else drawn(t, row) for row in range(6) for t in temperatures]
    logits = random_rows(len(choices), ends[-1], seed=ends[0])
    logits[::3] = np.round(logits[::3])  # equals, on several ranks
    logits[1::5, : ends[-1] // 2] -= 200.0  # parts that cannot win
    expected = choose(target, logits, choices)
    for tokens in choose_across(target, logits, choices, ends):
        assert tokens == expected


@pytest.mark.parametrize("target", QUICKLY_RUNNABLE)
def test_unusable_rows_are_told_as_of_whole_rows(target: CpuTarget) -> None:
    logits = random_rows(6, 1500)
    logits[0, 1400] = logits[0, 700] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = -np.inf
    logits[3, 1300] = np.inf
    logits[4, 3], logits[4, 1400] = np.inf, np.nan
    logits[5, 800:] = -np.inf
    for choices in ([BEST] * 6, [drawn(1.0, row) for row in range(6)]):
        tokens, scores = choose(target, logits, choices)
        for own_tokens, own_scores in choose_across(target, logits, choices, [600, 1000, 1500]):
            np.testing.assert_array_equal(own_scores, scores)
            assert own_tokens == tokens


@pytest.mark.parametrize("target", QUICKLY_RUNNABLE)
def test_more_rows_than_a_place_has_room_for(target: CpuTarget) -> None:
    """Then there are several rounds; threads share each."""
    count = 150_000
    logits = np.round(random_rows(count, 4))
    choices = [BEST, drawn(1.0, 3)] * (count // 2)
    expected = choose(target, logits, choices)
    assert all(tokens == expected for tokens in choose_across(target, logits, choices, [2, 4], threads=2))


@pytest.mark.parametrize("ends", [[512, 1024], [500, 1000, 1300]], ids=str)
def test_the_reference_chooses_the_same(ends: list[int]) -> None:
    """Draws are compared where rounding does not decide: noise differs by more than that between most tokens."""
    logits = random_rows(40, ends[-1])
    choices = RowChoices.of([BEST if row % 2 else drawn(1.0, row) for row in range(40)])
    parts = OnRanks(tuple(torch.from_numpy(part) for part in parts_of(logits, ends)))
    given = (torch.from_numpy(getattr(choices, name)) for name in ("temperature", "seeds", "counters"))
    tokens, scores = call_on_ranks(
        torch.ops.llmc.choose_across.default, (parts, torch.tensor(ends, dtype=torch.int32), *given), {}
    )
    target = QUICKLY_RUNNABLE[0]
    rows = [RowChoice(*row) for row in zip(*(a.tolist() for a in choices.arrays().values()), strict=True)]
    expected = choose(target, logits, rows)
    assert (tokens.tolist(), scores.tolist()) == expected
