"""Tiny seeded models of the families that llmc is tested on, in memory or as checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Shorter than the lengths that tests run, so that the window matters.
_WINDOW = 6
_MHA = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_GEMMA = {**_SIZES, "head_dim": 24}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _SIZES,
        "mistral": {**_SIZES, "sliding_window": _WINDOW},
        "qwen2": _SIZES,
        "qwen3": {**_SIZES, "head_dim": 24},
        "gemma": _GEMMA,
        "gemma2": {**_GEMMA, "sliding_window": _WINDOW, "query_pre_attn_scalar": 20},
        "gemma3_text": {
            **_GEMMA,
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "phi3": _SIZES,
        "gpt2": {
            "vocab_size": 160,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 320,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        "gpt_neox": _MHA,
        "olmo2": _SIZES,
        "starcoder2": _SIZES,
        "granite": {
            **_SIZES,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        "cohere": {**_SIZES, "logit_scale": 0.5},
        "smollm3": {**_SIZES, "no_rope_layers": [1, 0]},
        "stablelm": _SIZES,
    }
)

# Models for what only few families have: sinks, experts, attention code of their own, masks that llmc refuses.
SPECIAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt_oss": {**_SIZES, "sliding_window": _WINDOW, "head_dim": 16, "num_local_experts": 4},
        "mixtral": {**_SIZES, "num_local_experts": 4},
        "bloom": {"vocab_size": 160, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "llama4_text": {**_SIZES, "attention_chunk_size": 4, "head_dim": 16, "num_local_experts": 2},
        "doge": _SIZES,
        "phimoe": {**_SIZES, "sliding_window": _WINDOW, "num_local_experts": 4},
        "bert": {**_MHA, "is_decoder": False},
    }
)


def tiny_model(family: str, **overrides: Any) -> Any:
    """A transformers causal LM of 2 layers in fp32 with seeded weights, wide enough that its logits differ clearly.

    overrides: config settings, such as tie_word_embeddings=True, and all sizes of a family that is not listed here; by
    default ties are the family's own.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(family, **{**{**FAMILIES, **SPECIAL}.get(family, {}), **overrides})
    # sdpa, the choice of some versions of transformers for Gemma 2, leaves its soft cap out.
    with torch.random.fork_rng():
        torch.manual_seed(20240613)  # Of sinks and routers' biases, which begin as noise.
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(20240613)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices keep the size of what goes through them; norm weights and biases move away from 1 and 0.
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            start = torch.zeros_like(noise) if parameter.dim() > 1 else parameter
            parameter.copy_(start + scale * noise)
    return model.eval()


def tiny_checkpoint(family: str, directory: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Save `tiny_model` as config.json and model.safetensors in `directory`, and return it."""
    return saved(tiny_model(family, **overrides).to(dtype), directory)


def saved(model: Any, directory: Path) -> Path:
    """A model as a directory, whose capture is found again; that of a model in memory is not."""
    model.save_pretrained(directory)
    return directory


def tiny_tokens(length: int, vocab_size: int = 160) -> list[int]:
    """Token ids that repeat no pattern shorter than the vocabulary."""
    return [(7 + 37 * i + i * i) % vocab_size for i in range(length)]
