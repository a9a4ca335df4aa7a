"""llmc::causal_conv, llmc::causal_conv_with_state — y[t, c] = bias[c] + Σ_j weight[j, c]·x[t - width + 1 + j, c].

A convolution along tokens, of each channel by itself; what lies before the sequence is zero. Its state is the last
`width - 1` rows of x. Named after ONNX's CausalConvWithState.
"""

import sympy
import torch
from torch import Tensor

from llmc.graph.op_record import OpCall
from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op
from llmc.ops.states import scan_step


def _check(call: OpCall) -> str | None:
    x, weight = call.shape("x"), call.shape("weight")
    fits = len(x) == len(weight) == 2 and x[1] == weight[1]
    return None if fits else f"x {x} and weight {weight} are not [tokens, channels] and [width, channels]"


def _flops(call: OpCall) -> sympy.Expr:
    return 2 * call.elements() * call.arguments["weight"].shape[0]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """state: [width - 1, channels], the rows before x. Both results are fp32."""
    rows, taps = torch.cat((state, x.float())), weight.float()
    y = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(x.shape).clone()
    for j in range(taps.shape[0]):
        y += taps[j] * rows[j : j + x.shape[0]]
    return y, rows[x.shape[0] :]


@op(fake=like("x"), stages=UNTIL_SERVING, flops=_flops, check=_check, fallback="states")
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of one sequence. x: [tokens, channels]; weight: [width, channels]; bias: [channels]. In fp32,
    rounded once."""
    state = x.new_zeros((weight.shape[0] - 1, x.shape[1]), dtype=torch.float32)
    return _convolve(x, weight, bias, state)[0].to(x.dtype)


@op(fake=like("x"), stages=FROM_SERVING, flops=_flops, check=_check, writes=("state",))
def causal_conv_with_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """The convolution in a step. state: [slots, width - 1, channels]; the rest as in causal_conv and scan_step
    (ops/states.py)."""

    def scan(tokens: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        return _convolve(x[tokens], weight, bias, before)

    return scan_step(scan, torch.zeros_like(x), state, query_starts, context_lens, state_slots)
