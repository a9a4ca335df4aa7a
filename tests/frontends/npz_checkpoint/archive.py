"""A model as config.json and a NumPy archive, one of whose weights is int8 codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = "weights.npz"
CODED = "model.layers.0.mlp.down_proj.weight"


def saved_archive(model: Any, directory: Path) -> Path:
    """Write the model, whose coded weight becomes what its codes stand for."""
    model.config.save_pretrained(directory)
    weight = model.get_parameter(CODED)
    scales = weight.detach().abs().amax(1, keepdim=True) / 127
    codes = (weight.detach() / scales).round().to(torch.int8)
    with torch.no_grad():
        weight.copy_(codes * scales)
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items() if name != CODED}
    tensors |= {f"{CODED}.codes": codes.numpy(), f"{CODED}.scales": scales.numpy()}
    np.savez(directory / FILE, **tensors)
    return directory
