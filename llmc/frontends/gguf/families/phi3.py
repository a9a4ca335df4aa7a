"""Phi 3 and 4, with one matrix for Q, K and V, and one for the gate and what it lets through."""

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes
from llmc.frontends.gguf.placement import ATTENTION, GATED, Names
from llmc.frontends.gguf.rope import READ_APART, rotary_config

_LAYER = {
    "attn_norm": ATTENTION["attn_norm"],
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": ATTENTION["attn_output"],
    "ffn_norm": GATED["ffn_norm"],
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": GATED["ffn_down"],
}


def phi3(model: GgufModel, sizes: Sizes) -> Described:
    """Describe Phi 3 and 4. Models for long contexts have two sets of rotary factors."""
    rotated = sizes.hyper.whole("rope.dimension_count", default=sizes.head_dim)
    config = rotary_config(model, sizes, "phi3", "Phi3ForCausalLM", rotated)
    share = {"partial_rotary_factor": rotated / sizes.head_dim}
    rope = config["rope_parameters"] | share
    config |= {
        "rope_parameters": rope,
        **share,
        "hidden_act": "silu",
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", sizes.positions),
        "sliding_window": sizes.hyper.whole("attention.sliding_window", default=0) or None,
    }
    return Described(config, Names(_LAYER, read_apart=READ_APART))
