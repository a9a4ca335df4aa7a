"""OLMoE: a Llama whose layers have experts, and norms of all queries and all keys at once."""

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes
from llmc.frontends.gguf.placement import ATTENTION, EXPERTS, HEAD_NORMS, ROUTED, Names
from llmc.frontends.gguf.rope import rotary_config


def olmoe(model: GgufModel, sizes: Sizes) -> Described:
    """Describe OLMoE as llama.cpp computes it: the weights of chosen experts are those of the softmax over all."""
    config = {
        **rotary_config(model, sizes, "olmoe", "OlmoeForCausalLM"),
        "hidden_act": "silu",
        "num_experts": sizes.hyper.whole("expert_count"),
        "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": sizes.hyper.number("attention.clamp_kqv", default=0.0) or None,
    }
    return Described(config, Names({**ATTENTION, **HEAD_NORMS, **ROUTED}, experts=EXPERTS))
