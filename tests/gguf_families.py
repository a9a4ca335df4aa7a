"""Tiny models of the architectures that are read from GGUF files, as far as files can say what they are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.tiny_models import FAMILIES, tiny_model

_EXPERTS = {**FAMILIES["llama"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
# Columns are multiples of a block's 32, and what converters do not write is as llama.cpp takes it to be.
GGUF_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"attention_bias": True},
        "mistral": {"sliding_window": None, "head_dim": 24},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {},
        "gemma": {},
        "gemma2": {"query_pre_attn_scalar": 24},
        "gemma3_text": {
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "phi3": {"sliding_window": 6},
        "starcoder2": {"sliding_window": None},
        "mixtral": {"sliding_window": None},
        "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 160},
        "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True, "head_dim": 24},
        "gpt_oss": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "head_dim": 16,
            "sliding_window": 6,
            "rope_parameters": {"rope_theta": 150000.0, "rope_type": "default"},
        },
        "olmoe": {
            **FAMILIES["llama"],
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
        },
    }
)


def family_model(family: str, **overrides: Any) -> Any:
    """Of 2 layers, in fp32."""
    return tiny_model(family, **{"intermediate_size": 128, **GGUF_FAMILIES[family], **overrides})
