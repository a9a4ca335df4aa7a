"""A layer as Qwen's MTP for a model that has none: the next hidden state by least squares of what the layer reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.draft_checkpoints import QWEN


def fit_mtp(model: Path, text: Path, directory: Path, layers: int = 1, tokens: int = 2048, length: int = 256) -> Path:
    """Copy a Llama's directory and add so many layers, fitted on so many tokens of a text. Attention and feed-forward
    of a layer add nothing: `mtp.fc` does it all, which is enough for some drafts to come true."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(text.read_text()[: 8 * tokens])["input_ids"][:tokens]).view(-1, length)
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(model, dtype=torch.float32)
    before_norm: list[Tensor] = []
    loaded.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        normed = loaded.model(ids, use_cache=False).last_hidden_state
        embedded = loaded.model.embed_tokens(ids)
    states = before_norm[0]
    reads = torch.cat((_unit(embedded[:, 1:]), _unit(normed[:, :-1])), dim=-1).flatten(0, 1)
    weight = torch.linalg.lstsq(reads, states[:, 1:].flatten(0, 1)).solution.T
    width, last = states.shape[-1], f"model.layers.{loaded.config.num_hidden_layers - 1}."
    ones = torch.ones(width)
    added = {
        f"{QWEN['embedding']}.weight": ones,
        f"{QWEN['hidden']}.weight": ones,
        f"{QWEN['both']}.weight": weight,
        "mtp.norm.weight": tensors["model.norm.weight"],
    }
    for name, tensor in tensors.items():
        if name.startswith(last):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(layers):
                kept = torch.zeros_like(tensor) if adds else tensor
                added[f"mtp.layers.{layer}.{name.removeprefix(last)}"] = kept
    save_file(tensors | {name: tensor.clone().contiguous() for name, tensor in added.items()}, file)
    return directory


def _unit(x: Tensor) -> Tensor:
    return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
