"""Gemma 1 to 3, whose files hold the weights of norms with one added to them."""

from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes
from llmc.frontends.gguf.placement import ATTENTION, GATED, HEAD_NORMS, Names
from llmc.frontends.gguf.rope import rope_parameters, rotary_config

_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Layer counts of the 27B models, whose scores are not scaled by the head size. Files do not have the scale; llama.cpp
# also recognises these models by their layers.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_LOCAL_THETA = 10000.0


def gemma(model: GgufModel, sizes: Sizes) -> Described:
    config = {
        **rotary_config(model, sizes, "gemma", "GemmaForCausalLM"),
        "hidden_act": "gelu_pytorch_tanh",
    }
    return Described(config, Names({**ATTENTION, **GATED}, norms_less=1.0))


def gemma2(model: GgufModel, sizes: Sizes) -> Described:
    """Describe Gemma 2: every second layer has a window, beginning with the first."""
    config = {
        **rotary_config(model, sizes, "gemma2", "Gemma2ForCausalLM"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": sizes.hyper.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": sizes.hyper.number("final_logit_softcapping", default=30.0),
        "sliding_window": sizes.hyper.whole("attention.sliding_window"),
        "layer_types": _layer_types(sizes, 2),
        "query_pre_attn_scalar": _scaled_by(sizes, "gemma2"),
    }
    return Described(config, Names({**ATTENTION, **GATED, **_FOUR_NORMS}, norms_less=1.0))


def gemma3(model: GgufModel, sizes: Sizes) -> Described:
    """Describe Gemma 3: every sixth layer has full attention; the others have their own rotary frequencies."""
    caps = "final_logit_softcapping"
    local = sizes.hyper.number("rope.freq_base_swa", default=_LOCAL_THETA)
    config = {
        **rotary_config(model, sizes, "gemma3_text", "Gemma3ForCausalLM"),
        "rope_parameters": {
            "full_attention": rope_parameters(model, sizes),
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        caps: sizes.hyper.number(caps) if sizes.hyper.has(caps) else None,
        "sliding_window": sizes.hyper.whole("attention.sliding_window"),
        "layer_types": _layer_types(sizes, sizes.hyper.whole("attention.sliding_window_pattern", default=6)),
        "query_pre_attn_scalar": _scaled_by(sizes, "gemma3"),
    }
    return Described(config, Names({**ATTENTION, **GATED, **_FOUR_NORMS, **HEAD_NORMS}, norms_less=1.0))


def _layer_types(sizes: Sizes, period: int) -> list[str]:
    if period < 1:
        raise sizes.hyper.error("attention.sliding_window_pattern", period, "a number of layers")
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(sizes.layers)]


def _scaled_by(sizes: Sizes, name: str) -> int:
    return sizes.hidden // sizes.heads if sizes.layers == _LAYERS_OF_27B[name] else sizes.head_dim
