"""The inputs of a step that every kernel with a state reads: one request's tokens, and the slot of its state."""

import triton
import triton.language as tl


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
