"""llmc::select_channels — y[t, c] = x[t, order[c]], for weights whose columns are stored in another order."""

from torch import Tensor

from llmc.ops.registry import FROM_CAPTURED, op, per_element


@op(
    fake=lambda a: a.x.new_empty((*a.x.shape[:-1], a.order.shape[0])),
    stages=FROM_CAPTURED,
    flops=per_element(1),
    rows=("x",),
)
def select_channels(x: Tensor, order: Tensor) -> Tensor:
    """Select channels of x in a given order.

    x: [tokens, channels]; order: [selected], int32. Returns [tokens, selected].
    """
    return x[..., order.long()]
