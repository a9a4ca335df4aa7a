"""OLMoE: a Llama whose layers have experts, and norms of all queries and all keys at once."""

from llmc.graph.gguf.container import GgufModel
from llmc.graph.gguf.description import Described, sizes_of
from llmc.graph.gguf.placement import ATTENTION, EXPERTS, GATED, HEAD_NORMS, Names, placed
from llmc.graph.gguf.rope import rotary_config

_LAYER = {
    **ATTENTION,
    **HEAD_NORMS,
    "ffn_norm": GATED["ffn_norm"],
    "ffn_gate_inp": "mlp.gate",
}


def olmoe(model: GgufModel) -> Described:
    """As llama.cpp computes it: the weights of the experts that are taken are those of the softmax over all."""
    sizes = sizes_of(model)
    config = {
        **rotary_config(model, sizes, "olmoe", "OlmoeForCausalLM"),
        "hidden_act": "silu",
        "num_experts": sizes.hyper.whole("expert_count"),
        "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": sizes.hyper.number("attention.clamp_kqv", default=0.0) or None,
    }
    return Described(config, placed(model, Names(_LAYER, experts=EXPERTS), sizes.layers))
