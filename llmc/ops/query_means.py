"""llmc::query_means — notes the means of an attention's queries on a calibration text, for scores of its keys."""

from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import UNTIL_SERVING, like, op, per_element


def _means_fit(call: OpCall) -> str | None:
    x, means = call.shape("x"), call.shape("means")
    fits = len(x) == 3 and len(means) == 2 and means[0] == x[1] and x[2] <= means[1] <= x[2] + x[2] // 2
    return None if fits else f"query_means needs x [tokens, heads, channels] and means of its heads, got {x}, {means}"


@op(fake=like("x"), stages=UNTIL_SERVING, flops=per_element(0), rows=("x",), check=_means_fit)
def query_means(x: Tensor, means: Tensor) -> Tensor:
    """The queries themselves. llmc::score_expected takes the means, once the cache's rows have scores.

    x: [tokens, heads, channels], before their rotation. means: [heads, channels + rotary / 2], fp32, as score_expected
    describes them.
    """
    return x.clone()
