"""llmc::segments_of_texts: y[t] = number of separators before t in t's text, count - 1 at most."""

import torch
import triton
import triton.language as tl

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, named_arguments
from llmc.codegen.triton.kernels.refusals import takes
from llmc.program.launch_arguments import Count
from llmc.targets import GpuTarget

_BLOCK = 256


@triton.jit
def segments_of_texts_kernel(
    ids_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_row_stride: int,
    SEPARATOR: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program r: text r, a block of tokens at a time."""
    text = tl.program_id(0)
    first = tl.load(query_starts_ptr + text)
    end = tl.load(query_starts_ptr + text + 1)
    earlier = first * 0
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + token, mask=token < end, other=0)
        is_end = ((ids == SEPARATOR) & (token < end)).to(tl.int32)
        before = earlier + tl.cumsum(is_end, 0) - is_end
        tl.store(y_ptr + token.to(tl.int64) * y_row_stride, tl.minimum(before, COUNT - 1), mask=token < end)
        earlier += tl.sum(is_end, 0)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    """Return the single way: one launch."""
    arguments = named_arguments(segments_of_texts_kernel, call)
    constants = {"SEPARATOR": call.plain("separator"), "COUNT": call.plain("count"), "BLOCK": _BLOCK}
    return (DeviceLaunch(segments_of_texts_kernel, arguments, constants, (str(Count.REQUESTS),)),)


segments_of_texts = KernelTemplate(
    torch.ops.llmc.segments_of_texts.default, takes("ids[tokens |]", typed=()), candidates
)
