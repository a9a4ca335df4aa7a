"""A tiny model for each of transformers' weight converters, whatever the model does: towers and speech models, too."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from llmc.architectures.tiny_config import tiny_settings

_SMALL = {
    **{"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 160},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SOUND = {**_SMALL, "num_mel_bins": 16, "head_dim": None, "vocab_size": None}
_GLM5 = {
    **{"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4}
}
_GATED = {"use_swiglu_ffn": True}
_ERNIE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_BACKBONE = {
    **{"model_type": "rf_detr_dinov2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 14, "out_features": ["stage1", "stage2"]},
}
# What is different from the sizes that all tiny models have, by the name that transformers keeps converters under.
_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("Dinov2Backbone", "Dinov2Model", "Dinov2WithRegistersBackbone", "Dinov2WithRegistersModel"), _GATED
        ),
        **dict.fromkeys(("Tipsv2VisionBackbone", "Tipsv2VisionModel"), _GATED),
        "RfDetrModel": {"backbone_config": _BACKBONE, "num_queries": 8, "decoder_layers": 1},
        "deepseek_ocr2": {
            "text_config": {
                **{"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
                **{"num_experts_per_tok": 2, "num_key_value_heads": 4},
            }
        },
        "dots3_note_vision_encoder": {
            **{"adapter_in_dim": 64, "adapter_out_dim": 64},
            "per_layer_config": {"1": {"num_local_experts": 4}},
        },
        "ernie4_5_vl_moe": {
            "text_config": {"moe_intermediate_size": [32, 16], "rope_parameters": _ERNIE_ROPE},
            "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
        },
        "glm5_next": {"text_config": _GLM5},
        "glm5_next_text": _GLM5,
        "gradium_phonon_tts": {
            "flow_head_config": {"condition_dim": 64, "hidden_size": 32, "num_hidden_layers": 2},
            "num_key_value_heads": 4,
        },
        "inkling_mm_model": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "dense_intermediate_size": None}},
        "nemo_speechlm": {
            "audio_config": {
                "asr_config": _SOUND,
                "diarization_config": {
                    "audio_config": _SOUND,
                    "head_config": {"audio_hidden_size": 64, "hidden_size": 32},
                },
            },
            "text_config": {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3},
            "word_timestamp_config": {"blank_token_id": 5, "num_key_value_heads": 4},
        },
        "qwen3_omni_moe": {
            "talker_config": {
                "text_config": {**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 32},
                "code_predictor_config": _SMALL,
                **{"spatial_merge_size": 2, "thinker_hidden_size": 64},
            },
            "code2wav_config": {**_SMALL, "decoder_dim": 32, "codebook_size": 32, "vocab_size": None},
        },
        "qwen4_exp_text": {
            **{"ple_layer_ids": [1], "ngram_vocab_size_base": 40, "heads_per_ngram": 2, "split_ngram_parts": 4},
            "make_ngram_vocab_size_divisible_by": 8,
        },
    }
)
# Where the name is that of a part which no auto class makes.
_CLASSES = {
    "UnlimitedOcrVisionEncoder": "UnlimitedOcrForConditionalGeneration",
    "dots3_note_vision_encoder": "Dots3NoteVisionModel",
}


def converted_model(key: str) -> Any:
    """In fp32 with seeded weights. key: a model type or a class, as converters are kept."""
    model_class = _class_of(key)
    config_class = model_class.config_class
    settings = _merged(tiny_settings(config_class.model_type, config_class, {}), _SETTINGS.get(key, {}))
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**settings), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def converters_without(model: Any, stored: tuple[str, ...]) -> list[list[str]]:
    """The source patterns of the model's converters that none of these tensors is for."""
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    tensors = model.state_dict()
    met = {rename_source_key(name, renamings, converters, model.base_model_prefix, tensors)[1] for name in stored}
    return [converter.source_patterns for converter in converters if met.isdisjoint(converter.source_patterns)]


def _class_of(key: str) -> Any:
    known_class = getattr(transformers, _CLASSES.get(key, key), None)
    if known_class is not None:
        return known_class
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES):
        if key in mapping:
            name = mapping[key]
            return getattr(transformers, name if isinstance(name, str) else name[0])
    config_class = transformers.CONFIG_MAPPING[key]
    room = importlib.import_module(config_class.__module__.replace("configuration", "modeling"))
    models: list[Any] = [var for var in vars(room).values() if isinstance(var, type) and "config_class" in dir(var)]
    return next(
        model
        for model in models
        if model.config_class is config_class and not model.__name__.endswith("PreTrainedModel")
    )


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """With the changes in nested settings, too; None removes one."""
    result = dict(settings)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return {
        key: _merged(value, {}) if isinstance(value, dict) else value
        for key, value in result.items()
        if value is not None
    }
