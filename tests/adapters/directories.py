"""Adapter directories of tiny models, written by PEFT itself or by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA_TARGETS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 112),
    "mlp.up_proj": (64, 112),
    "mlp.down_proj": (112, 64),
}


def peft_adapter(model: Any, directory: Path, *, seed: int = 1, **config: Any) -> Any:
    """Wrap a transformers model, give its matrices seeded values, save the adapter and return the wrapped model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(str(directory))
    return adapted.eval()


def written_adapter(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """The two files of an adapter. tensors: by what comes after base_model.model."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (directory / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return directory


def llama_adapter(
    directory: Path, *, rank: int = 4, seed: int = 1, layers: int = 2, scale: float = 0.1, **config: Any
) -> Path:
    """An adapter of every linear layer of tiny_models' llama."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, (inputs, outputs) in LLAMA_TARGETS.items():
            name = f"model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * scale
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * scale
    return written_adapter(directory, tensors, r=rank, lora_alpha=2 * rank, **config)
