"""llmc::head_linear — y[t, h] = x[t, h]·weight[h]ᵀ: a product of its own for each head."""

import torch
from torch import Tensor

from llmc.graph.op_record import OpCall, product
from llmc.ops.registry import FROM_CAPTURED, op


def _check(call: OpCall) -> str | None:
    x, weight = call.shape("x"), call.shape("weight")
    if len(x) != 3 or len(weight) != 3:
        return f"x {x} and weight {weight} are not [tokens, heads, in] and [heads, out, in]"
    return None if [x[1], x[2]] == [weight[0], weight[2]] else f"x {x} does not fit weight {weight}"


@op(
    fake=lambda a: a.x.new_empty((a.x.shape[0], *a.weight.shape[:2])),
    stages=FROM_CAPTURED,
    flops=lambda call: 2 * call.sizes("x")[0] * product(call.sizes("weight")),
    rows=("x",),
    check=_check,
    axes="x[h i!] weight[h o! i!] -> [h o!]",
)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head by its own matrix.

    x: [tokens, heads, in]; weight: [heads, out, in]. Returns [tokens, heads, out]: sums in fp32, rounded once.
    """
    return torch.einsum("thi,hoi->tho", x.float(), weight.float()).to(x.dtype)
