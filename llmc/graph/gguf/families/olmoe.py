"""OLMoE: a Llama whose layers have experts, and norms of all queries and all keys at once."""

from __future__ import annotations

from llmc.graph.gguf.container import GgufModel
from llmc.graph.gguf.description import Described, decoder_config, rms_norm_eps, sizes_of
from llmc.graph.gguf.placement import ATTENTION, GATED, Names, placed
from llmc.graph.gguf.rope import rope_parameters

_LAYER = {
    **ATTENTION,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": GATED["ffn_norm"],
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def olmoe(model: GgufModel) -> Described:
    """As llama.cpp computes it: the weights of the experts that are taken are those of the softmax over all."""
    sizes = sizes_of(model)
    config = {
        **decoder_config(model, sizes, "olmoe", "OlmoeForCausalLM"),
        **rms_norm_eps(sizes),
        "rope_parameters": rope_parameters(model, sizes),
        "hidden_act": "silu",
        "num_experts": sizes.hyper.whole("expert_count"),
        "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": sizes.hyper.number("attention.clamp_kqv", default=0.0) or None,
    }
    return Described(config, placed(model, Names(_LAYER, experts=_EXPERTS), sizes.layers))
