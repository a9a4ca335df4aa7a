"""llmc::gated_activation — y = activation(gate)·up — and the closed list of activations that kernels know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from llmc.ops.registry import FROM_CAPTURED, like, op, per_element

# The order is the number that the C++ kernels use (enum Activation in kernels/api.h).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def apply_activation(x: Tensor, name: str) -> Tensor:
    """The named activation of an fp32 tensor."""
    return ACTIVATIONS[name](x)


@op(fake=like("gate"), stages=FROM_CAPTURED, flops=per_element(5), rows=("gate", "up"))
def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """y = activation(gate)·up in fp32, rounded once. gate, up: [..., channels] of one dtype."""
    return (apply_activation(gate.float(), activation) * up.float()).to(gate.dtype)
