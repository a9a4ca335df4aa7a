"""Shared parts of ops with states. A state summarizes all tokens of a sequence in one layer, in fp32, with a fixed
size.

Each such op has two forms, as attention does: over one whole sequence, which starts from zero, and over a step of many
requests, whose states are in slots and are updated in place. Both take the tokens of a sequence one by one, in order,
so the bits of a result do not depend on how a sequence is cut into steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall

# One sequence from a state: the token rows of its result, and the state after them.
Scan = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def scan_step(
    scan: Scan,
    y: Tensor,
    state: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    initial: float = 0.0,
) -> Tensor:
    """Fill y, token rows, request by request, and put each request's state back into its slot.

    state: [slots, …]; query_starts: [requests + 1], context_lens: [requests], as in paged_attention; state_slots:
    [requests], int32. A request whose tokens are the first of its sequence begins from `initial`, whatever its slot
    holds.
    """
    for r, slot in enumerate(state_slots.tolist()):
        tokens = slice(int(query_starts[r]), int(query_starts[r + 1]))
        has_state = int(context_lens[r]) > tokens.stop - tokens.start
        before = state[slot] if has_state else torch.full_like(state[slot], initial)
        y[tokens], state[slot] = scan(tokens, before)
    return y


def check_floats(call: OpCall, names: tuple[str, ...]) -> str | None:
    """Return what is wrong with a call if a scan's inputs are not float; None if they are. Scans compute in fp32."""
    for name in names:
        value = call.arguments[name]
        if isinstance(value, Tensor) and value.dtype is not torch.float32:
            return f"{name} is {value.dtype}; scans take float32"
    return None
