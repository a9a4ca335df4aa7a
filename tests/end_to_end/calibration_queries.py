"""The calibration text of tests, and the queries of transformers' models on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import tiny_tokens

LENGTH = 64
_TOKENS = 10 * LENGTH


def write_calibration(directory: Path) -> dict[str, Any]:
    """Write the text; returns the options of a build with it."""
    path = directory / "calibration.json"
    path.write_text(json.dumps(tiny_tokens(_TOKENS)))
    return {"calibration": path, "calibration_length": LENGTH}


@torch.inference_mode()
def calibration_queries(model: Any) -> list[Tensor]:
    """The queries of each layer on the text before their rotation, [tokens, heads, channels], as hooks see them behind
    the norm of queries, if there is one."""
    layers = [layer.self_attn for layer in model.model.layers]
    found: list[list[Tensor]] = [[] for _ in layers]
    hooks = []
    for attention, seen in zip(layers, found, strict=True):

        def note(module: Any, inputs: Any, output: Tensor, own: Any = attention, seen: list[Tensor] = seen) -> None:
            seen.append(output.reshape(-1, own.head_dim))

        made = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
        hooks.append(made.register_forward_hook(note))
    for part in torch.tensor(tiny_tokens(_TOKENS)).split(LENGTH):
        model(part[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts).view(_TOKENS, -1, parts[0].shape[-1]) for parts in found]
