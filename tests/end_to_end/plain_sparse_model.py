"""Zeros in a Hugging Face model as the papers choose them: module by module, by hooks, sorting what is to be sorted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.passes.sparsity.plain_sparsegpt import plain_sparsegpt

# Of a layer, those that read the same input together.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def plain_sparse_model(
    directory: Path, calibration: Sequence[Tensor], method: str, ratio: float, pattern: tuple[int, int] | None
) -> PreTrainedModel:
    """The model with zeros in the products of its layers, each chosen with the inputs that sparse ones before give."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = torch.stack([ids for ids in calibration if len(ids) == len(calibration[0])])
    for layer in model.model.layers:
        for group in _GROUPS:
            modules = [module for name, module in layer.named_modules() if name.rpartition(".")[2] in group]
            x = torch.empty(0) if method == "magnitude" else _input_of(model, modules[0], batch)
            for module in modules:
                module.weight.data = _pruned(module.weight.data, x, method, ratio, pattern)
    return model


@torch.inference_mode()
def _input_of(model: PreTrainedModel, module: nn.Module, batch: Tensor) -> Tensor:
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, 1)))
    for ids in batch.split(16):
        model.model(ids)
    hook.remove()
    return torch.cat(inputs)


def _pruned(weight: Tensor, x: Tensor, method: str, ratio: float, pattern: tuple[int, int] | None) -> Tensor:
    if method == "sparsegpt":
        return plain_sparsegpt(weight, x, ratio, pattern).float()
    worth = weight.abs() if method == "magnitude" else weight.abs() * x.norm(dim=0)
    if pattern is not None:
        worth = worth.view(-1, pattern[1])
        ratio = 1 - pattern[0] / pattern[1]
    elif method == "magnitude":
        worth = worth.view(1, -1)
    least = worth.argsort(dim=1, stable=True)[:, : round(ratio * worth.shape[1])]
    pruned = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, least, True)
    return weight.masked_fill(pruned.view_as(weight), 0.0)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, windows: Sequence[Tensor]) -> float:
    """Of the model on the windows' tokens, each window by itself."""
    total, tokens = 0.0, 0
    for ids in windows:
        logits = model(ids[None]).logits[0]
        total += float(cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    return float(torch.tensor(total / tokens).exp())
