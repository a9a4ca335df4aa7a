"""llmc::selective_scan, llmc::selective_scan_with_state — the recurrence of Mamba 1, of each channel c by itself.

    S[c, n] ← exp(dt[t, c]·A[c, n])·S[c, n] + dt[t, c]·x[t, c]·B[t, n];    y[t, c] = Σ_n S[c, n]·C[t, n]

Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces".
"""

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op
from llmc.ops.states import check_floats, scan_step


def _check(call: OpCall) -> str | None:
    x, dt, a, b, c = (call.shape(name) for name in ("x", "dt", "A", "B", "C"))
    if not (len(x) == len(a) == len(b) == 2 and x == dt and b == c and a == [x[1], b[1]]):
        return f"x {x}, dt {dt}, A {a}, B {b} and C {c} are not those of channels with states of one size"
    return check_floats(call, ("x", "dt", "A", "B", "C"))


def _flops(call: OpCall) -> sympy.Expr:
    return 6 * call.elements() * call.arguments["A"].shape[1]


def _scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """state: [channels, n]."""
    y = torch.empty_like(x)
    for t in range(x.shape[0]):
        state = torch.exp(dt[t, :, None] * A) * state + (dt[t] * x[t])[:, None] * B[t]
        y[t] = (state * C[t]).sum(-1)
    return y, state


@op(fake=like("x"), stages=UNTIL_SERVING, flops=_flops, check=_check, fallback="states")
def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The scan of one sequence. x, dt: [tokens, channels]; A: [channels, n]; B, C: [tokens, n]; all fp32. Returns
    [tokens, channels]."""
    return _scan(x, dt, A, B, C, torch.zeros_like(A))[0]


@op(fake=like("x"), stages=FROM_SERVING, flops=_flops, check=_check, writes=("state",))
def selective_scan_with_state(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """The scan in a step. state: [slots, channels, n]; the rest as in selective_scan and scan_step (ops/states.py)."""

    def scan(tokens: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _scan(x[tokens], dt[tokens], A, B[tokens], C[tokens], before)

    return scan_step(scan, torch.zeros_like(x), state, query_starts, context_lens, state_slots)
