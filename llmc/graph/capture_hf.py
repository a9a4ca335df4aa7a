"""Capture of transformers models: from a checkpoint directory without its weights, or from a model in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CaptureError
from llmc.graph import hf_hooks
from llmc.graph.capture_cache import capture_entry, find_capture, keep_capture
from llmc.graph.capture_program import graph_from_program
from llmc.graph.checkpoint import SafetensorsSource, read_json
from llmc.graph.fake_copy import fake_copy, make_parameters_fake
from llmc.graph.hf_config import (
    check_directory,
    check_rope,
    generation_defaults,
    load_config,
    model_info,
    resolve_dtype,
    valid_values,
)
from llmc.graph.hf_names import stored_recipes
from llmc.graph.memory_source import MemorySource, tied_names
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.quantization_config import is_quantized
from llmc.graph.quantized_checkpoint import QuantizedSource
from llmc.graph.trace import explained_at_once, trace
from llmc.graph.weights import Recipe, Stored, WeightSource
from llmc.options import BuildOptions


def capture_directory(directory: Path, options: BuildOptions) -> tuple[ModelGraph, WeightSource]:
    """Capture a directory with config.json and safetensors weights; reads headers, never weight data.

    A graph that was captured from the same before is read from the cache (graph/capture_cache.py).
    """
    check_directory(directory)
    entry = capture_entry(directory, options)
    kept = None if entry is None else find_capture(entry)
    if kept is not None:
        kept.info = replace(kept.info, name=directory.resolve().name)
        return kept, SafetensorsSource(directory)
    graph, source = _capture_directory(directory, options)
    if entry is not None:
        keep_capture(entry, graph)
    return graph, source


def _capture_directory(directory: Path, options: BuildOptions) -> tuple[ModelGraph, WeightSource]:
    config, model_class = load_config(directory)
    check_rope(config, directory / "config.json")
    quantized = is_quantized(read_json(directory / "config.json"))
    source = QuantizedSource(directory) if quantized else SafetensorsSource(directory)
    dtype = resolve_dtype(options, getattr(config, "dtype", None) or source.dtype(), directory)
    config._attn_implementation = hf_hooks.implementation_for(model_class)
    with torch.device("meta"), valid_values(config.model_type, directory / "config.json"):
        model = model_class._from_config(config, dtype=dtype)
    _compute_buffers(model)
    recipes = stored_recipes(model, source)
    make_parameters_fake(model)
    info = model_info(directory.resolve().name, config, generation_defaults(directory), dtype)
    return _capture(model.eval(), recipes, info), source


def capture_pretrained(model: Any, options: BuildOptions) -> tuple[ModelGraph, WeightSource]:
    """Capture a transformers causal LM that is in memory, which is left as it was."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(model).__name__} is an encoder-decoder model",
            fix="llmc compiles decoder language models: ids to logits",
        )
    check_rope(model.config, "model.config")
    dtype = resolve_dtype(options, model.dtype)
    recipes: dict[str, Recipe] = {name: Stored(first, dtype) for name, first in tied_names(model).items()}
    fake = fake_copy(model, dtype, cast_buffers=False)
    # Set on the copy, whose layers all refer to this one config.
    fake.config._attn_implementation = hf_hooks.implementation_for(type(model))
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    generation = model.generation_config.to_dict() if getattr(model, "generation_config", None) is not None else {}
    info = model_info(Path(name).name, model.config, generation, dtype)
    return _capture(fake, recipes, info), MemorySource(dict(model.named_parameters()))


class LogitsOnly(nn.Module):
    """A transformers causal LM as forward(input_ids, positions) -> logits of all tokens, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: [1, T]; returns [1, T, vocab]."""
        with explained_at_once():
            logits: Tensor = self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        return logits


def _capture(model: Any, recipes: dict[str, Recipe], info: ModelInfo) -> ModelGraph:
    # A few models read this from the config alone.
    model.config.use_cache = False
    program = trace(LogitsOnly(model), with_positions=True)
    return graph_from_program(program, recipes, info, prefix="model.")


def _compute_buffers(model: Any) -> None:
    """Give buffers that were built on the meta device their values, the way from_pretrained does: by _init_weights."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
