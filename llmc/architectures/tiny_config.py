"""A tiny configuration of any causal architecture of transformers: its defaults, with every size made small."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from llmc.architectures.variants import VARIANTS
from llmc.errors import CaptureError
from llmc.frontends.transformers.config import import_transformers

# The maximum number of parameters of a tiny model. A configuration with size names that are not listed here would fill
# the memory.
_PARAMETERS = 20_000_000

# Setting → small value. Architectures name the same thing differently; a setting that one lacks is left out.
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 160),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width", "word_embed_proj_dim"), 64),
        **dict.fromkeys(("attention_hidden_size", "dim_model"), 64),
        **dict.fromkeys(("intermediate_size", "d_ff", "dim_ff", "dense_intermediate_size"), 112),
        **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 112),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 320),
        **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "dim_head"), 16),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
        **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "encoder_layers", "first_k_dense_replace"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head", "v_head_dim"), 16),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
        **dict.fromkeys(("mamba_n_heads", "num_mamba_heads", "chunk_size", "mamba_chunk_size"), 8),
        **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "linear_num_value_heads", "encoder_attention_heads"), 4),
        **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2),
        # Shorter than the lengths that are compared, so that the window matters.
        **dict.fromkeys(("sliding_window", "attention_window", "attention_window_size", "attention_chunk_size"), 6),
        # No shorter than any length that is compared: indexers that choose among keys compile so.
        "index_topk": 320,
        "rotary_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "hidden_size_per_layer_input": 16,
        # Settings of the towers of multimodal models, which are not built.
        "image_size": 32,
        "patch_size": 8,
        "text_hidden_size": 64,
        "out_hidden_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
)
# Buffers that are added to scores while experts are chosen, and zeros in a model that was not trained.
_CHOOSING = frozenset({"e_score_correction_bias", "expert_bias", "balancing_biases"})
_LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_INDEXER = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 320, "indexer_compress_ratio": 4},
}
# Layers with a window have their own sizes.
_DOTS3_WINDOWS = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "q_lora_rank": 24, "kv_lora_rank": 24},
    **{"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24},
}
_DOTS3 = {
    **{"num_key_value_heads": 4, "shared_experts_intermediate_size": 32},
    "per_layer_config": {"1": _DOTS3_WINDOWS},
}
# Layers before the recurrent ones, the recurrent ones, and layers after them: one of each kind.
_DORY = {
    **{"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    # Its learned scales are stored as multiples of the first one, whose default is small compared with the noise of
    # tiny models.
    **{"initializer_range": 1.0, "ngpt_alpha_init": 0.5},
}
_LLAMA4 = {"num_hidden_layers": 4, "layer_types": [*["chunked_attention"] * 3, "full_attention"]}
_ZAMBA = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": None}

# Where settings depend on each other, by model type; None removes a setting from the small ones.
_OVERRIDES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), _LATENT),
        **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu", "kimi_linear", "sarvam_mla"), _LATENT),
        "bamba": {"attn_layer_indices": [1]},
        "bailing_hybrid": {**_LATENT, "n_group": 1, "qk_head_dim": None, "num_mtp_layers": 0},
        "blt": {"encoder_hash_byte_group_vocab": 500, "vocab_size": 260},
        **{f"blt_local_{part}": {"hidden_size_global": 64, "vocab_size": 260} for part in ("encoder", "decoder")},
        "cohere_compass_text": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
                for kind in ("full_attention", "sliding_attention")
            }
        },
        "cpmant": {"prompt_length": 8, "prompt_types": 3},
        "dbrx": {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
            "max_seq_len": 320,
        },
        "dots1": {"n_shared_experts": 1},
        **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS3),
        "dory": _DORY,
        "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "flint": {"mlp_only_layers": [0]},
        "gemma3n_text": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
        },
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 6},
        "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
        # The fourth layer has neither chunks nor rotations.
        **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
        "longcat_flash": {**_LATENT, "ffn_hidden_size": 112, "zero_expert_num": 2, "num_layers": 1},
        "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
        "phi4_multimodal_audio": {
            "num_blocks": 1,
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 64),
        },
        "phi4_multimodal_vision": {"crop_size": 32},
        **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _INDEXER),
        # Blocks of the gates' matrices as wide as kernels take them.
        "recurrent_gemma": {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 20], "is_decoder": True},
        "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
        "xlm": {"emb_dim": 64, "n_words": 160},
        "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
        # The second hybrid layer has the attention of the first.
        "zamba": {**_ZAMBA, "attention_head_dim": 32, "num_key_value_heads": 4},
        "zamba2": {**_ZAMBA, "attention_head_dim": None, "kv_channels": None, "mamba_headdim": None},
        "zaya": {"num_experts_per_tok": 1},
    }
)


def architectures() -> Iterator[tuple[str, str]]:
    """(model type, class name) of each class in transformers' causal mapping, in the order of their model types, each
    with its variants after it."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        yield model_type, name
        yield from ((variant, name) for variant in VARIANTS if variant.partition("+")[0] == model_type)


def tiny_config(name: str) -> Any:
    """A configuration with about 100,000 parameters. name: A model type or a variant of one.

    Raises CaptureError for a name that is neither.
    """
    transformers = import_transformers()
    class_name = dict(architectures()).get(name)
    if class_name is None:
        raise CaptureError(
            f"transformers {transformers.__version__} has no causal architecture {name!r}",
            at=f"model type {name!r}",
            fix="choose an architecture that it has: llmc models",
        )
    config_class = getattr(transformers, class_name).config_class
    config = config_class(**tiny_settings(name.partition("+")[0], config_class, VARIANTS.get(name, {})))
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def tiny_settings(model_type: str, config_class: Any, variant: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration, including the parts of a multimodal one. variant: the settings that differ."""
    from transformers import CONFIG_MAPPING

    known = config_class().to_dict()
    small = {key: value for key, value in _SIZES.items() if key in known}
    settings = {**small, **_each_kind_of_layer(known), **_OVERRIDES.get(model_type, {}), **variant}
    for part in config_class.sub_configs:
        part_type = (known.get(part) or {}).get("model_type")
        if part_type and part not in settings:
            settings[part] = tiny_settings(part_type, CONFIG_MAPPING[part_type], {})
    return {key: value for key, value in settings.items() if value is not None}


def _each_kind_of_layer(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return layer kinds with one layer of each kind of the default configuration, whose first two may be of one
    kind."""
    kinds = {key: list(dict.fromkeys(known.get(key) or ())) for key in _LAYER_KINDS}
    kinds = {key: choices for key, choices in kinds.items() if len(choices) > 1}
    if not kinds:
        return {}
    layers = max(map(len, kinds.values()))
    return {"num_hidden_layers": layers, **{key: (choices * layers)[:layers] for key, choices in kinds.items()}}


def tiny_architecture(name: str) -> Any:
    """A model of `tiny_config` in fp32 with seeded weights, wide enough that its logits differ clearly.

    Raises CaptureError for a name that has no tiny configuration.
    """
    transformers = import_transformers()
    config = tiny_config(name)
    model_class = getattr(transformers, dict(architectures())[name])
    try:
        count = _parameters(model_class, config)
    except ImportError:  # The package of another modality's tower may be missing: llmc builds only the text half.
        config = config.get_text_config(decoder=True)
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        count = _parameters(model_class, config)
    if count > _PARAMETERS:
        raise CaptureError(
            f"the small configuration of {name!r} has {count:,} parameters: llmc cannot reduce all of its sizes",
            at=f"model type {name!r}",
            fix="pass a model of this architecture: llmc explain MODEL",
        )
    # As `llmc verify` does: sdpa, the choice of some versions of transformers for Gemma 2, leaves its soft cap out.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240613)  # Vectors that are initialised with noise: sinks, time steps of states.
        model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(20240613)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices preserve the magnitude of activations; norm weights and biases differ from 1 and 0.
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * noise + (0 if parameter.dim() > 1 else parameter))
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] in _CHOOSING:
                # Below what any score makes up for, so that what is not to be chosen must not count as 0.
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator) - 2)
    return model.eval()


def _parameters(model_class: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
