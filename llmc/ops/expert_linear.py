"""llmc::expert_linear, llmc::sum_experts — products with those of many weights that each token was sent to.

The weights of all experts are one matrix [experts · out, in], expert after expert, so that whatever stores a weight
stores them. Which experts a token goes to is `index`, what each of them counts is for the sum.
"""

from typing import Any

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import OpCall, product
from llmc.ops.registry import FROM_CAPTURED, PRODUCT, op

# Rows of a weight that kernels multiply with together: those of an expert begin with another such panel.
PANEL_ROWS = 32
# Up to this number of tokens, the reference multiplies all rows by every expert, each at its place. A library's product
# may sum rows in a different order if the other rows differ, and routing must not change any bit.
FEW_TOKENS = 16


def _check(call: OpCall) -> str | None:
    x, weight, index, experts = call.shape("x"), call.shape("weight"), call.shape("index"), call.arguments["experts"]
    if len(weight) != 2 or weight[0] % experts:
        return f"a weight {weight} is not that of {experts} experts"
    if len(index) != 2 or len(x) not in (2, 3):
        return f"x {x} and index {index} are not [tokens, in], or [tokens, slots, in], and [tokens, slots]"
    fits = x[-1] == weight[1] and (len(x) == 2 or x[1] == index[1])
    return None if fits else f"x {x} with index {index} does not fit weight {weight} of {experts} experts"


def _flops(call: OpCall) -> sympy.Expr:
    return 2 * product(call.sizes("index")) * product(call.sizes("weight")) / call.arguments["experts"]


def _share(call: OpCall) -> sympy.Expr:
    """The share of the experts' weights that tokens read if all are routed to different experts."""
    experts = sympy.Integer(call.arguments["experts"])
    return sympy.Min(experts, product(call.sizes("index"))) / experts


def _fake(a: Any) -> Tensor:
    shape = (*a.index.shape, a.weight.shape[0] // a.experts)
    result: Tensor = a.x.new_empty(shape, dtype=a.dtype or a.x.dtype)
    return result


@op(
    fake=_fake,
    stages=FROM_CAPTURED,
    flops=_flops,
    rows=("x", "index"),
    share=_share,
    check=_check,
    takes=PRODUCT,
    axes="x[i] weight[e:o i] bias[e:o] -> [o]",
)
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, experts: int, dtype: torch.dtype | None = None
) -> Tensor:
    """y[t, s] = x[t]·weight[index[t, s]]ᵀ + bias[index[t, s]], of sums in fp32, rounded once.

    x: [tokens, in], or [tokens, slots, in], where each slot has its own; weight: [experts · out, in]; bias:
    [experts · out]; index: [tokens, slots], integer; returns [tokens, slots, out], zero where index is not an expert.
    """
    rows = x.unsqueeze(1) if x.dim() == 2 else x
    weights = weight.unflatten(0, (experts, -1))
    y = rows.new_zeros((*index.shape, weights.shape[1]), dtype=torch.float32)
    for expert in range(experts):
        sent = index == expert
        if len(index) <= FEW_TOKENS:
            of_expert = (rows.float() @ weights[expert].float().t()).expand(*y.shape)[sent]
        else:
            of_expert = rows.expand(*index.shape, -1)[sent].float() @ weights[expert].float().t()
        y[sent] = of_expert if bias is None else of_expert + bias.unflatten(0, (experts, -1))[expert].float()
    return y.to(dtype or x.dtype)


@op(
    fake=lambda a: a.x.new_empty((a.x.shape[0], a.x.shape[2])),
    stages=FROM_CAPTURED,
    flops=lambda call: 2 * product(call.sizes("x")),
    rows=("x", "weights"),
    axes="x[c] -> [c]",
    linear_in="x",
)
def sum_experts(x: Tensor, weights: Tensor) -> Tensor:
    """y[t] = Σ_s weights[t, s]·x[t, s], in fp32 and in the order of slots, rounded once. x: [tokens, slots, channels];
    weights: [tokens, slots], of any floating dtype; returns [tokens, channels]."""
    y = x[:, 0].float() * weights[:, 0, None].float()
    for slot in range(1, x.shape[1]):
        y = y + x[:, slot].float() * weights[:, slot, None].float()
    return y.to(x.dtype)
