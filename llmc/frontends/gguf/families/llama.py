"""Llama, and all that is converted as it: Mistral, and Mixtral, which is a Llama with experts."""

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes, has_bias
from llmc.frontends.gguf.placement import ATTENTION, GATED, Names
from llmc.frontends.gguf.rope import READ_APART, rotary_config

_MIXTRAL = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}


def llama(model: GgufModel, sizes: Sizes) -> Described:
    """Rows of Q and K are stored with the pairs that are rotated together side by side."""
    experts = sizes.hyper.whole("expert_count", default=0)
    kind = ("mixtral", "MixtralForCausalLM") if experts else ("llama", "LlamaForCausalLM")
    config = {**rotary_config(model, sizes, *kind), "hidden_act": "silu"}
    rotated = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    if experts:
        config |= {
            "num_local_experts": experts,
            "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
            "sliding_window": None,
        }
        layer = {**ATTENTION, "ffn_norm": GATED["ffn_norm"], "ffn_gate_inp": "block_sparse_moe.gate"}
        return Described(config, Names(layer, experts=_MIXTRAL, rotated=rotated, read_apart=READ_APART))
    config |= {"attention_bias": has_bias(model, "attn_q"), "mlp_bias": has_bias(model, "ffn_up")}
    return Described(config, Names({**ATTENTION, **GATED}, rotated=rotated, read_apart=READ_APART))
