"""Run the quantization passes over a tiny Llama and look at what they made."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, default, quantization
from llmc.passes.rewrite import Pass
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.quantized_checkpoints import tiny_llama

TOKENS = tuple((11 * i + 5) % 96 for i in range(23))


@functools.cache
def captured_llama() -> Captured:
    """A tiny Llama at the canonical stage, and its weights."""
    options = parse_options({})
    fresh = capture(tiny_llama(), options)
    return Captured(run_pipeline(fresh.graph, canonical(), options).graph, fresh.source)


# Columns of q_proj, as SmolLM2 has them, of o_proj, a third of 1,536, and of down_proj, as Qwen2 0.5B has them.
_HIDDEN, _HEADS, _INNER = 576, 512, 896


@functools.cache
def odd_llama() -> Captured:
    """A Llama of one layer whose widths are multiples of 32 and 64, at the canonical stage, and its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=1,
        num_attention_heads=_HEADS // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
    )
    options = parse_options({})
    model: Any = LlamaForCausalLM(config)
    model.train(False)
    fresh = capture(model, options)
    return Captured(run_pipeline(fresh.graph, canonical(), options).graph, fresh.source)


def calibration_file(directory: Path, tokens: int = 2048) -> str:
    """Token ids that follow each other in runs, so that inputs are correlated as in text."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 4, (tokens,), generator=generator).cumsum(0)
    path = directory / "tokens.json"
    path.write_text(json.dumps((steps % 96).tolist()))
    return str(path)


def quantized(
    quantize: str, *, passes: Sequence[Pass] | None = None, captured: Captured | None = None, **options: Any
) -> PipelineResult:
    """The canonical graph after the quantization passes, or others."""
    parsed = parse_options({"quantize": quantize, "calibration_length": 64, **options})
    given = captured or captured_llama()
    return run_pipeline(given.graph, passes or quantization(), parsed, data=ModelData(given.source))


def optimized(quantize: str, **options: Any) -> PipelineResult:
    """The graph after every pass that follows the canonical ones."""
    return quantized(quantize, passes=default()[len(canonical()) :], **options)


def logits(graph: ModelGraph, captured: Captured | None = None) -> Tensor:
    """Of TOKENS."""
    return run_tokens(graph, (captured or captured_llama()).source, TOKENS)


def logit_error(graph: ModelGraph) -> float:
    """Root mean square difference from the unquantized model, over the logits' spread."""
    reference = logits(captured_llama().graph)
    return float((logits(graph) - reference).square().mean().sqrt() / reference.std())
