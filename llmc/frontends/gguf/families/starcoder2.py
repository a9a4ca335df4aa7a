"""StarCoder 2: layer norms, biases everywhere, and no gate."""

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes, decoder_config, has_bias
from llmc.frontends.gguf.placement import ATTENTION, Names
from llmc.frontends.gguf.rope import rope_parameters

_LAYER = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def starcoder2(model: GgufModel, sizes: Sizes) -> Described:
    """Describe StarCoder 2 without a window, as llama.cpp computes it, because files do not give one."""
    config = {
        **decoder_config(model, sizes, "starcoder2", "Starcoder2ForCausalLM"),
        "norm_epsilon": sizes.hyper.number("attention.layer_norm_epsilon"),
        "rope_parameters": rope_parameters(model, sizes),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has_bias(model, "attn_q"),
        "sliding_window": sizes.hyper.whole("attention.sliding_window", default=0) or None,
    }
    return Described(config, Names(_LAYER))
