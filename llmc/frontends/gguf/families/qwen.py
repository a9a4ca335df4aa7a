"""Qwen 2, 2.5 and 3, dense and with experts."""

from typing import Any

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes, has_bias
from llmc.frontends.gguf.placement import ATTENTION, EXPERTS, GATED, HEAD_NORMS, ROUTED, Names
from llmc.frontends.gguf.rope import rotary_config

_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def qwen2(model: GgufModel, sizes: Sizes) -> Described:
    """The config and tensor names of Qwen 2. Its class always has biases for Q, K and V."""
    return Described(_config(model, sizes, "qwen2", "Qwen2ForCausalLM"), Names({**ATTENTION, **GATED}))


def qwen3(model: GgufModel, sizes: Sizes) -> Described:
    """The config and tensor names of Qwen 3, with norms of each head's queries and keys."""
    config = {
        **_config(model, sizes, "qwen3", "Qwen3ForCausalLM"),
        "attention_bias": has_bias(model, "attn_q"),
    }
    return Described(config, Names({**ATTENTION, **GATED, **HEAD_NORMS}))


def qwen2moe(model: GgufModel, sizes: Sizes) -> Described:
    """The config and tensor names of Qwen 2 MoE, with an expert that all tokens share."""
    config = {
        **_config(model, sizes, "qwen2_moe", "Qwen2MoeForCausalLM"),
        **_expert_sizes(sizes),
        "shared_expert_intermediate_size": sizes.hyper.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }
    layer = {**ATTENTION, **ROUTED, **_SHARED}
    return Described(config, Names(layer, experts=EXPERTS, rows=("ffn_gate_inp_shexp",)))


def qwen3moe(model: GgufModel, sizes: Sizes) -> Described:
    """The config and tensor names of Qwen 3 MoE. The weights of the chosen experts sum to one, as in llama.cpp."""
    config = {
        **_config(model, sizes, "qwen3_moe", "Qwen3MoeForCausalLM"),
        **_expert_sizes(sizes),
        "norm_topk_prob": True,
        "attention_bias": has_bias(model, "attn_q"),
    }
    return Described(config, Names({**ATTENTION, **HEAD_NORMS, **ROUTED}, experts=EXPERTS))


def _config(model: GgufModel, sizes: Sizes, model_type: str, class_name: str) -> dict[str, Any]:
    rotary = rotary_config(model, sizes, model_type, class_name)
    return {**rotary, "hidden_act": "silu", "use_sliding_window": False}


def _expert_sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "num_experts": sizes.hyper.whole("expert_count"),
        "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
        "moe_intermediate_size": sizes.hyper.whole("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
