"""Variants of an architecture, selected by its settings, that run different code and are therefore also surveyed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "original_max_position_embeddings": 80,
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 40,
}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 80},
    **{"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
}

# Model type, +, and the variant → its settings in addition to those of the tiny configuration.
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bamba+full": {"attn_layer_indices": [0, 1]},
        "deepseek_v2+whole_queries": {"q_lora_rank": None},
        "deepseek_v3+groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        "deepseek_v3+unnormalized": {
            **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
            **{"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        },
        "deepseek_v3+whole_queries": {"q_lora_rank": None},
        "deepseek_v3+yarn": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
        "falcon+alibi": {"alibi": True},
        "falcon+many_heads": {"multi_query": False, "parallel_attn": False, "bias": True},
        "falcon+new_decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "gemma4_text+experts": {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 32},
        "gemma4_text+keys_as_values": {"attention_k_eq_v": True},
        "glm4_moe+norms": {"use_qk_norm": True},
        "gpt2+by_layer": {"scale_attn_by_inverse_layer_idx": True},
        "gpt_bigcode+many_heads": {"multi_query": False},
        "gpt_neox+sequential": {"use_parallel_residual": False},
        "granitemoehybrid+dense": {"num_local_experts": 0},
        "granitemoehybrid+rope": {"position_embedding_type": "rope"},
        "llama+llama3": {"rope_parameters": _LLAMA3},
        "llama+yarn": {"rope_parameters": _YARN},
        "llama+biases": {"attention_bias": True, "mlp_bias": True},
        "mamba2+groups": {"n_groups": 2},
        "olmo+clipped": {"clip_qkv": 0.5},
        "opt+norms_behind": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "phi+norms": {"qk_layernorm": True},
        "phi3+longrope": {"rope_parameters": _LONG, "original_max_position_embeddings": 80},
        "qwen2+window": {"use_sliding_window": True, "max_window_layers": 1},
        "qwen2_moe+dense_layer": {"mlp_only_layers": [0]},
        "stablelm+parallel": {"use_parallel_residual": True, "qk_layernorm": True},
        "starcoder2+whole": {"sliding_window": None},
        "zamba2+adapters": {"use_shared_attention_adapter": True, "adapter_rank": 8, "num_key_value_heads": 4},
        "zamba2+two_blocks": {
            **{"num_mem_blocks": 2, "use_mem_rope": True, "num_hidden_layers": 8},
            "layers_block_type": ["mamba", "hybrid"] * 4,
        },
    }
)
