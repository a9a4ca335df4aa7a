"""Take out of a transformers model what the passes took out of its graph."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmc.formats.pruned_part import PrunedPart
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, quantization
from llmc.passes.rewrite import Pass
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.family_captures import FamilyCapture


def calibration(directory: Path, vocabulary: int = 160) -> str:
    """Token ids that follow each other in runs."""
    steps = torch.randint(1, 4, (1024,), generator=torch.Generator().manual_seed(3)).cumsum(0)
    path = directory / "tokens.json"
    path.write_text(json.dumps((steps % vocabulary).tolist()))
    return str(path)


def pruned(
    family: FamilyCapture, prune: str, calibration: str | None, passes: Sequence[Pass] | None = None, **options: Any
) -> PipelineResult:
    """The graph of a family after the passes up to those that prune and round."""
    parsed = parse_options({"prune": prune, "calibration": calibration, "calibration_length": 64, **options})
    chosen = passes or (*canonical(), *quantization())
    return run_pipeline(family.captured.graph, chosen, parsed, data=ModelData(family.captured.source))


def without(model: Any, parts: Sequence[PrunedPart]) -> Any:
    """A copy of a model that has these parts no more: its modules are smaller, not zero."""
    made = copy.deepcopy(model)
    for part in parts:
        if part.kind == "layer":
            continue
        parent = made.get_submodule(part.module.rpartition(".")[0])
        kept = torch.tensor([i for i in range(part.of) if i not in part.removed])
        _shrink_mlp(parent, kept) if part.kind == "channels" else _shrink_attention(made.config, parent, kept, part.of)
    dropped = {index for part in parts if part.kind == "layer" for index in part.removed}
    _drop(made, dropped)
    return made


def _shrink_mlp(mlp: Any, kept: Tensor) -> None:
    if hasattr(mlp, "gate_up_proj"):
        channels = mlp.gate_up_proj.weight.shape[0] // 2
        _keep(mlp.gate_up_proj, torch.cat((kept, kept + channels)), 0)
    for name in ("gate_proj", "up_proj", "c_fc"):
        if hasattr(mlp, name):
            _keep(getattr(mlp, name), kept, 0)
    _keep(mlp.c_proj if hasattr(mlp, "c_proj") else mlp.down_proj, kept, 1)


def _shrink_attention(config: Any, attention: Any, kept: Tensor, kv_heads: int) -> None:
    """Query heads of a KV head lie next to each other."""
    if hasattr(attention, "c_attn"):
        width = attention.embed_dim // kv_heads
        channels = _blocks(kept, width)
        _keep(attention.c_attn, torch.cat([channels + i * attention.embed_dim for i in range(3)]), 0)
        _keep(attention.c_proj, channels, 1)
        attention.num_heads, attention.split_size = len(kept), len(channels)
        return
    width, group = attention.head_dim, config.num_attention_heads // kv_heads
    _keep(attention.q_proj, _blocks(kept, group * width), 0)
    _keep(attention.k_proj, _blocks(kept, width), 0)
    _keep(attention.v_proj, _blocks(kept, width), 0)
    _keep(attention.o_proj, _blocks(kept, group * width), 1)


def _blocks(kept: Tensor, width: int) -> Tensor:
    return (kept[:, None] * width + torch.arange(width)).flatten()


def _keep(linear: Any, kept: Tensor, axis: int) -> None:
    """axis: 0 for outputs, 1 for inputs; GPT-2's Conv1D has its weight the other way round."""
    is_conv = not isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.data.index_select(1 - axis if is_conv else axis, kept))
    if axis == 0:
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias.data[kept])
        if is_conv:
            linear.nf = len(kept)


def _drop(model: Any, dropped: set[int]) -> None:
    body = model.transformer if hasattr(model, "transformer") else model.model
    name = "h" if hasattr(body, "h") else "layers"
    layers = getattr(body, name)
    types = getattr(model.config, "layer_types", None)
    kept = [i for i in range(len(layers)) if i not in dropped]
    setattr(body, name, nn.ModuleList(layers[i] for i in kept))
    model.config.num_hidden_layers = len(kept)
    if types is not None:
        model.config.layer_types = [types[i] for i in kept]
