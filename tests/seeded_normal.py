"""Random tensors that are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded_normal(seed: int, *shape: int, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
    """fp32 numbers of a normal distribution."""
    return mean + deviation * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
