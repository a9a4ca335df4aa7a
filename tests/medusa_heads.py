"""Medusa heads in each published layout, with seeded weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional


def medusa_1(
    path: Path, channels: int, *, heads: int = 2, layers: int = 1, outputs: Tensor | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """Keys `{head}.{layer}.linear.weight`. outputs: each head's own output matrix."""
    generator = torch.Generator().manual_seed(channels)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"{prefix}{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(channels, channels, generator=generator) * channels**-0.5
            tensors[f"{name}.bias"] = torch.randn(channels, generator=generator) * 0.1
        if outputs is not None:
            tensors[f"{prefix}{head}.{layers}.weight"] = outputs.clone()
    save_file(tensors, path)
    return tensors


def vllm(
    path: Path, channels: int, *, heads: int = 2, outputs: list[Tensor] | None = None, token_map: Tensor | None = None
) -> dict[str, Tensor]:
    """Keys `blocks.{head}.layers.{layer}.weight`, without biases."""
    generator = torch.Generator().manual_seed(channels)
    tensors = {
        f"blocks.{head}.layers.0.weight": torch.randn(channels, channels, generator=generator) * channels**-0.5
        for head in range(heads)
    }
    tensors |= {f"lm_heads.{head}.weight": output.clone() for head, output in enumerate(outputs or ())}
    if token_map is not None:
        tensors["token_map"] = token_map
    save_file(tensors, path)
    return tensors


def head_states(tensors: dict[str, Tensor], head: int, states: Tensor) -> Tensor:
    """What a head of one of these layouts makes of hidden states, in plain torch."""
    weights = {name: value for name, value in tensors.items() if name.removeprefix("blocks.").startswith(f"{head}.")}
    for name in sorted(n for n in weights if n.endswith("weight") and ("linear" in n or "layers" in n)):
        bias = weights.get(name.removesuffix("weight") + "bias")
        states = states + functional.silu(functional.linear(states, weights[name], bias))
    return states
