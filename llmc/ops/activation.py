"""The closed list of activations that kernels know."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

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
