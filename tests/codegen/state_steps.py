"""Steps in which three requests with states come whole or cut into chunks, for kernels of every target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SLOTS = 4
# Requests of a step: slot, first position, tokens.
Requests = list[tuple[int, int, int]]
WHOLE: Requests = [(2, 0, 9), (0, 0, 1), (3, 0, 6)]
CUT: list[Requests] = [[(2, 0, 4), (3, 0, 1)], [(3, 1, 2), (2, 4, 1), (0, 0, 1)], [(2, 5, 4), (3, 3, 3)]]

# (state, the step's metadata, tokens of it) → y of these tokens.
Run = Callable[[Tensor, list[Tensor], Tensor], Tensor]


def step_tensors(requests: Requests) -> list[Tensor]:
    """query_starts, context_lens, state_slots."""
    starts = [sum(count for _, _, count in requests[:i]) for i in range(len(requests) + 1)]
    lengths = [first + count for _, first, count in requests]
    return [torch.tensor(values, dtype=torch.int32) for values in (starts, lengths, [slot for slot, _, _ in requests])]


def outputs(run: Run, shape: tuple[int, ...], steps: list[Requests]) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
    """y by slot and position, and the states afterwards, which began as what nobody may read."""
    state = torch.full((SLOTS, *shape), torch.nan)
    rows: dict[tuple[int, int], Tensor] = {}
    for requests in steps:
        places = [(slot, first + i) for slot, first, count in requests for i in range(count)]
        y = run(state, step_tensors(requests), torch.tensor([16 * slot + position for slot, position in places]))
        rows |= {place: y[i].clone() for i, place in enumerate(places)}
    return rows, state


def check(kernel: Run, reference: Run, shape: tuple[int, ...], tolerance: float = 2e-5) -> None:
    rows, state = outputs(kernel, shape, [WHOLE])
    expected, expected_state = outputs(reference, shape, [WHOLE])
    for place, y in expected.items():
        torch.testing.assert_close(rows[place], y, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, expected_state, rtol=2e-5, atol=2e-5, equal_nan=True)
    again, cut_state = outputs(kernel, shape, CUT)
    assert all(torch.equal(again[place], y) for place, y in rows.items())
    assert torch.equal(cut_state.nan_to_num(7.0), state.nan_to_num(7.0))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
