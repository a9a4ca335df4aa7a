"""What every kernel with a state reads of a step: one request's tokens, and the slot that its state is in."""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.program.launch_arguments import Argument


@triton.jit
def carried(
    request: tl.tensor, query_starts_ptr: tl.tensor, context_lens_ptr: tl.tensor, state_slots_ptr: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(first token, behind the last, slot, tokens before the first) of a request.

    Where there are none before the first, nothing of the slot may be read.
    """
    first = tl.load(query_starts_ptr + request)
    end = tl.load(query_starts_ptr + request + 1)
    slot = tl.load(state_slots_ptr + request).to(tl.int64)
    return first, end, slot, tl.load(context_lens_ptr + request) - (end - first)


def carried_arguments(call: Call) -> dict[str, Argument]:
    """The state and what says whose it is."""
    return {
        "state_ptr": call.state("state"),
        "query_starts_ptr": call.vector("query_starts"),
        "context_lens_ptr": call.vector("context_lens"),
        "state_slots_ptr": call.vector("state_slots"),
    }
