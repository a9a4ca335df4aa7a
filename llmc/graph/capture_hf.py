"""Capture of transformers models: from a checkpoint directory without its weights, or from a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from llmc.errors import CheckpointError
from llmc.graph import hf_hooks
from llmc.graph.capture_program import graph_from_program
from llmc.graph.checkpoint import SafetensorsSource, read_json
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.trace import trace
from llmc.graph.weights import Recipe, Stored, WeightSource
from llmc.options import BuildOptions


class LogitsOnly(nn.Module):
    """A transformers causal LM as forward(input_ids, positions) -> logits of all tokens, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: [1, T]; returns [1, T, vocab]."""
        logits: Tensor = self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        return logits


def capture_directory(directory: Path, options: BuildOptions) -> tuple[ModelGraph, WeightSource]:
    """Capture a directory with config.json and safetensors weights; reads headers, never weight data."""
    source = SafetensorsSource(directory)
    config, model_class = load_config(directory)
    dtype = resolve_dtype(options, getattr(config, "dtype", None) or source.dtype(), directory)
    config._attn_implementation = hf_hooks.IMPLEMENTATION
    hf_hooks.register()
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    model.eval()
    _compute_buffers(model)
    names = checkpoint_names(model, source.names(), directory)
    _make_parameters_fake(model)
    program = trace(LogitsOnly(model))

    def recipe_of(target: str) -> Recipe | None:
        name = names.get(target)
        return None if name is None else Stored(name, dtype)

    info = model_info(directory.resolve().name, config, dtype, directory)
    return graph_from_program(program, recipe_of, info, prefix="model."), source


def load_config(directory: Path) -> tuple[Any, Any]:
    """The transformers config and causal-LM class of a directory; raises CheckpointError for an unknown one."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = read_json(directory / "config.json").get("model_type", "")
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if class_name is None:
        raise CheckpointError(f"unknown architecture {model_type!r}", at=directory / "config.json")
    model_class = getattr(transformers, class_name)
    return model_class.config_class.from_pretrained(directory, local_files_only=True), model_class


def resolve_dtype(options: BuildOptions, stored: torch.dtype, at: Path | None) -> torch.dtype:
    """The dtype to build in: the option's, or the checkpoint's own where an engine can compute in it."""
    if options.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    if stored not in (torch.float32, torch.bfloat16):
        raise CheckpointError(
            f"the checkpoint is {str(stored).removeprefix('torch.')}, which engines do not compute in",
            at=at,
            fix="choose dtype=float32 (exact) or dtype=bfloat16 (half the memory)",
        )
    return stored


def model_info(name: str, config: Any, dtype: torch.dtype, directory: Path | None) -> ModelInfo:
    """What the engine must know beside the graph, from config.json and generation_config.json."""
    generation = directory / "generation_config.json" if directory is not None else None
    defaults = read_json(generation) if generation is not None and generation.is_file() else {}

    def token_ids(key: str) -> tuple[int, ...]:
        value = defaults.get(key)
        value = getattr(config, key, None) if value is None else value
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list | tuple) else (int(value),)

    return ModelInfo(
        name=name,
        family=config.model_type,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        dtype=dtype,
        bos_token_id=next(iter(token_ids("bos_token_id")), None),
        eos_token_ids=token_ids("eos_token_id"),
    )


def checkpoint_names(model: nn.Module, stored: tuple[str, ...], at: Path) -> dict[str, str]:
    """The checkpoint tensor of every parameter and saved buffer of a model; tied ones share a name.

    Raises CheckpointError that names the tensors which the checkpoint lacks.
    """
    available = set(stored)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    names: dict[str, str] = {}
    missing: list[str] = []
    for group in groups.values():
        candidates = (c for name in group for c in (name, name.removeprefix(prefix), prefix + name))
        found = next((c for c in candidates if c in available), None)
        if found is None:
            missing.append(group[0])
        names.update((name, found) for name in group if found is not None)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]!r}",
            at=at,
            fix="check that config.json belongs to these weights and that all shards are there",
        )
    return names


def _compute_buffers(model: Any) -> None:
    """Give buffers that were built on the meta device their values, the way from_pretrained does: by _init_weights."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()


def _make_parameters_fake(model: nn.Module) -> None:
    """Turn meta parameters into fake CPU ones, so that the traced graph names no meta device; ties are kept."""
    fakes: dict[int, nn.Parameter] = {}
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in fakes:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=False)
                module._parameters[name] = fakes[id(parameter)]
