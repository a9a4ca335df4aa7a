"""Give bits out among weights, or elements that are kept, so that what is expected to diverge is least: a knapsack."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

S = TypeVar("S")
# Number of parts in which the budget above the minimum bits of all weights is assigned.
_BUDGET_PARTS = 20_000


@dataclass(frozen=True)
class Rung(Generic[S]):
    """A choice for a unit: what it takes of all its weights' budget, and the divergence that is expected. scheme: None
    for none."""

    scheme: S | None
    bits: float
    divergence: float


def spend(ladders: Sequence[Sequence[Rung[S]]], bits: float) -> list[int]:
    """The rung of each ladder, so that all together take at most `bits` and diverge least.

    Each ladder's rungs in ascending bits; the first ones take no more than `bits` together. Source: the multiple-choice
    knapsack problem, by dynamic programming over what is spent, in parts of the budget; each cost is rounded up.
    """
    left = bits - sum(ladder[0].bits for ladder in ladders)
    part = max(left, 1e-9) / _BUDGET_PARTS
    # The least divergence of the processed ladders by parts spent, and the last ladder's rung for it.
    least = np.zeros(_BUDGET_PARTS + 1)
    rungs: list[npt.NDArray[np.int64]] = []
    for ladder in ladders:
        table = np.full((len(ladder), _BUDGET_PARTS + 1), np.inf)
        for row, cost, rung in zip(table, _costs(ladder, part), ladder, strict=True):
            if cost <= _BUDGET_PARTS:
                row[cost:] = least[: _BUDGET_PARTS + 1 - cost] + rung.divergence
        rungs.append(table.argmin(0))
        least = table.min(0)
    chosen: list[int] = []
    parts = _BUDGET_PARTS
    for ladder, of_ladder in zip(reversed(ladders), reversed(rungs), strict=True):
        chosen.append(int(of_ladder[parts]))
        parts -= _costs(ladder, part)[chosen[-1]]
    return chosen[::-1]


def _costs(ladder: Sequence[Rung[S]], part: float) -> list[int]:
    return [math.ceil((rung.bits - ladder[0].bits) / part) for rung in ladder]
