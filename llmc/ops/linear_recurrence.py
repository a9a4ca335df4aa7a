"""llmc::linear_recurrence, llmc::linear_recurrence_with_state — what each channel holds when a token comes.

    y[t, c] = S[c];  then S[c] ← decay[t, c]·S[c] + x[t, c]  or, tropical,  S[c] ← max(decay[t, c] + S[c], x[t, c])

S begins as `initial`. The first rule is the RG-LRU's. The second is the same in the semiring of max and +: the running
maximum of exponents, with which RWKV and the mLSTM keep their sums of exponentials in range. A token's own contribution
is left to the ops after it, because models differ there. Sources: De et al. 2024, "Griffin"; Peng et al. 2023, "RWKV";
Beck et al. 2024, "xLSTM".
"""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op, per_element
from llmc.ops.states import check_floats, scan_step


def _check(call: OpCall) -> str | None:
    x, decay = call.shape("x"), call.shape("decay")
    if len(x) != 2 or x != decay:
        return f"x {x} and decay {decay} are not [tokens, channels] both"
    return check_floats(call, ("x", "decay"))


def _scan(x: Tensor, decay: Tensor, tropical: bool, state: Tensor) -> tuple[Tensor, Tensor]:
    """state: [channels]."""
    y = torch.empty_like(x)
    for t in range(x.shape[0]):
        y[t] = state
        state = torch.maximum(decay[t] + state, x[t]) if tropical else decay[t] * state + x[t]
    return y, state


@op(fake=like("x"), stages=UNTIL_SERVING, flops=per_element(2), check=_check, fallback="states")
def linear_recurrence(x: Tensor, decay: Tensor, initial: float = 0.0, tropical: bool = False) -> Tensor:
    """The recurrence of one sequence. x, decay: [tokens, channels], fp32. Returns [tokens, channels]."""
    return _scan(x, decay, tropical, x.new_full((x.shape[1],), initial))[0]


@op(fake=like("x"), stages=FROM_SERVING, flops=per_element(2), check=_check, writes=("state",))
def linear_recurrence_with_state(
    x: Tensor,
    decay: Tensor,
    initial: float,
    tropical: bool,
    state: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """The recurrence in a step. state: [slots, channels]; the rest as in linear_recurrence and scan_step
    (ops/states.py)."""

    def scan(tokens: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _scan(x[tokens], decay[tokens], tropical, before)

    return scan_step(scan, torch.zeros_like(x), state, query_starts, context_lens, state_slots, initial)
