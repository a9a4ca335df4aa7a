"""Medusa heads in torch: h + silu(W·h + b), layer after layer, through the model's output matrix.

Every layer of every head has its own weights. (The reference implementation repeats one block in all layers of a
head.) Heads start as the identity: a head then predicts the model's next token, one token too early.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class MedusaHeads(nn.Module):
    """Trained Medusa heads. heads: head i is about the token i + 2 places after the one whose state it reads."""

    def __init__(self, channels: int, heads: int, layers: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        self.heads, self.layers = heads, layers
        for _ in range(heads * layers):
            # Not zero, so that layers of a head do not stay alike.
            start = torch.randn(channels, channels, generator=generator) * 0.01 * channels**-0.5
            self.weights.append(nn.Parameter(start))
            self.biases.append(nn.Parameter(torch.zeros(channels)))

    def forward(self, states: Tensor, head: int) -> Tensor:
        """The output of one head for states: [rows, channels]."""
        for layer in range(head * self.layers, (head + 1) * self.layers):
            states = states + functional.silu(functional.linear(states, self.weights[layer], self.biases[layer]))
        return states

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the heads' tensors by the names of the published format (Medusa-1), without output matrices, because
        the model's is shared."""
        tensors = {}
        for place in range(self.heads * self.layers):
            name = f"{place // self.layers}.{place % self.layers}.linear"
            tensors[f"{name}.weight"] = self.weights[place].detach()
            tensors[f"{name}.bias"] = self.biases[place].detach()
        return tensors
