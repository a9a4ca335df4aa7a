"""A tiny gpt-oss with its experts in MXFP4, laid out as on the hub, by code that shares nothing with the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import tiny_model

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def tiny_gpt_oss(**overrides: Any) -> Any:
    """With columns that blocks of 32 divide."""
    sizes: dict[str, Any] = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tiny_model("gpt_oss", **{**sizes, **overrides})


def write_blocks(directory: Path, model: Any) -> dict[str, Tensor]:
    """Save the model with codes drawn by chance for its experts; what they stand for, by the model's names."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in load_file(file).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        groups = columns // 32
        blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (experts, rows, groups), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = _numbers(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return meant


def _numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, rows, columns]: the low half of a byte is the first of two columns."""
    table = torch.tensor(_E2M1)
    halves = torch.empty(*blocks.shape[:-1], 32)
    halves[..., 0::2], halves[..., 1::2] = table[(blocks & 15).long()], table[(blocks >> 4).long()]
    return (halves * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)
