"""What the tiny llama computes with an adapter in its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.tiny_models import tiny_model


def merged_logits(directory: Path | None, tokens: Sequence[int], model: Any = None) -> np.ndarray[Any, Any]:
    """Of the tiny llama, or `model`, which is one. directory: as llama_adapter writes it, None for none."""
    model = tiny_model("llama") if model is None else copy.deepcopy(model)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        tensors = {} if directory is None else load_file(directory / "adapter_model.safetensors")
        for name in [name for name in tensors if "lora_A" in name]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += 2 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        logits: np.ndarray[Any, Any] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits
