"""How long a launch should take on a GPU: what its choice predicted, or else the roofline of bytes and operations."""

from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch, Limits, RowCount
from llmc.program.launch_arguments import Operand
from llmc.program.library_collectives import FUNCTIONS
from llmc.targets import GpuTarget

_RANKS = Operand("engine", "ranks")
# Shares of the peak that attention of several tokens reaches. Measured for an 8B model on an H200: 345 of 989 TFLOP/s.
# With warps that only copy: assumed, below the 582 that FlashAttention-3 has without overlap of softmax and products.
_ATTENTION_SHARES = {"paged_prefill_kernel": 0.35, "ragged_attention_kernel": 0.35, "specialized_prefill_kernel": 0.55}


def launch_seconds(launch: Launch, step: StepShape, target: GpuTarget, limits: Limits) -> float:
    """Return the seconds of one launch, its start included.

    The prediction holds for the maximum number of rows. Fewer rows take less time, but at least that of the roofline.
    """
    values = step.values()
    transfer = evaluate_expression(launch.bytes_moved, values) / target.bandwidth
    rate = target.bf16_rate * _ATTENTION_SHARES.get(launch.family, 1.0)
    roofline = max(transfer, evaluate_expression(launch.flops, values) / rate)
    if launch.seconds is None:
        return roofline + target.launch
    is_logits = launch.only is not None and launch.only.rows is RowCount.LOGIT_ROWS
    largest = limits.max_logit_rows if is_logits else limits.max_batch_tokens
    most = largest if launch.only is None or launch.only.last is None else min(launch.only.last, largest)
    rows = step.logit_rows if is_logits else step.tokens
    meeting = _meeting_seconds(launch, target)
    return max(roofline, meeting + (launch.seconds - meeting) * min(1.0, rows / most)) + target.launch


def _meeting_seconds(launch: Launch, target: GpuTarget) -> float:
    """Minimum seconds of a launch in which ranks exchange data, for any number of rows."""
    link = target.links.within
    if _RANKS not in launch.arguments.values() or launch.seconds is None:
        return 0.0
    is_library = launch.family in FUNCTIONS
    start = min(protocol.start for protocol in link.protocols) if is_library or link.shot is None else link.shot.start
    return min(start, launch.seconds)
