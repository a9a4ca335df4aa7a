"""The numbers of tokens, and of logit rows, that steps with prompts are padded to so that CUDA graphs can run them."""

from llmc.prediction.step_launches import is_empty
from llmc.prediction.step_price import StepPrice, gpu_price
from llmc.prediction.step_shape import StepShape
from llmc.program import Program, RowCount
from llmc.targets import GpuTarget

MOST_TOKENS = 1024
# Seconds that a graph saves per launch. Assumed: prompts of 512 tokens of 8B and 1B took 3.7 µs per launch more on an
# H200 than a graph of the same launches is predicted to take (docs/gpu.md).
_SAVED = 2e-6
# A step of at most this many tokens takes the time in which its weights are read.
_FEW_TOKENS = 64
# The shortest bucket, as a share of its tokens: more of them are too many graphs.
_LEAST_SPAN = 1 / 16


def token_buckets(program: Program, target: GpuTarget) -> tuple[int, ...]:
    """Return the numbers of tokens, ascending; larger steps gain nothing. A step and its bucket have the same launches.

    Args:
        program: A program of one rank.
        target: The GPU that runs it.
    """
    if program.layout.ranks > 1 or not (program.caches or program.states):
        return ()
    price = gpu_price(program.launches, program.limits, 1, target, target.links.within)
    limit = min(MOST_TOKENS, program.limits.max_batch_tokens)
    ends = range_ends(program, RowCount.TOKENS)
    sizes = sorted({limit, *range(8, limit, 8), *(end for end in ends if 2 <= end < limit)})
    buckets: list[int] = []
    first = 2
    while first <= limit:
        size = _largest(price, first, [size for size in sizes if size >= first], ends)
        if size is None or (size not in ends and size - first + 1 < size * _LEAST_SPAN):
            break
        buckets.append(size)
        first = size + 1
    return tuple(buckets)


def range_ends(program: Program, rows: RowCount) -> frozenset[int]:
    """The last number of rows of each range in which a launch of the program runs."""
    ranges = (launch.only for launch in program.launches)
    own = [only for only in ranges if only is not None and only.rows is rows]
    return frozenset({only.last for only in own if only.last is not None} | {only.first - 1 for only in own})


def _largest(price: StepPrice, first: int, sizes: list[int], ends: frozenset[int]) -> int | None:
    """The largest size to which a step of `first` tokens can be padded in the time that its graph saves."""
    step = StepShape.prefill(first)
    launched = (
        count
        for launch, count, _ in price.launches
        if launch.runs(tokens=first, logit_rows=1) and not is_empty(launch, step)
    )
    limit = price.seconds(step) + _SAVED * sum(launched)
    largest = None
    for size in sizes:
        costs_too_much = size > _FEW_TOKENS and price.seconds(StepShape.prefill(size)) > limit
        if size > 2 * first + 12 or costs_too_much:
            break
        largest = size
        if size in ends:
            break
    return largest
