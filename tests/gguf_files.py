"""GGUF files of transformers models, written with the gguf package as llama.cpp's converters do it, by code that shares
nothing with the reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
_DECODER = (
    (r"model\.embed_tokens\.(.*)", "token_embd.{}"),
    (r"model\.norm\.(.*)", "output_norm.{}"),
    (r"lm_head\.(.*)", "output.{}"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.*)", "blk.{}.attn_norm.{}"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(.*)", "blk.{}.attn_{}.{}"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.(.*)", "blk.{}.attn_{}_norm.{}"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.(.*)", "blk.{}.attn_output.{}"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.*)", "blk.{}.ffn_{}.{}"),
)
_NORM_BEFORE_MLP = ((r"model\.layers\.(\d+)\.post_attention_layernorm\.(.*)", "blk.{}.ffn_norm.{}"),)


@dataclass(frozen=True)
class Converter:
    """architecture: in the file. names: patterns of transformers' names and what they become. pairs: whether rows of Q
    and K are put so that what is rotated together stands side by side. added: to norms. metadata: of the config."""

    architecture: str
    names: tuple[tuple[str, str], ...] = (*_DECODER, *_NORM_BEFORE_MLP)
    pairs: bool = False
    added: float = 0.0
    metadata: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    # Of experts [experts, in, out], whose columns are a gate's and another's in turn.
    in_turn: bool = False


def _window(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)


def _gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    _window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    _window(writer, config)
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    writer.add_uint32("gemma3.attention.sliding_window_pattern", full[0] + 1)


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    _window(writer, config)
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))


def _starcoder2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_layer_norm_eps(config.norm_epsilon)


def _mixtral(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _olmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    _window(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _qwen_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    _olmoe(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


_LAYER = r"model\.layers\.(\d+)\."
_FOUR_NORMS = (
    (_LAYER + r"post_attention_layernorm\.(.*)", "blk.{}.post_attention_norm.{}"),
    (_LAYER + r"pre_feedforward_layernorm\.(.*)", "blk.{}.ffn_norm.{}"),
    (_LAYER + r"post_feedforward_layernorm\.(.*)", "blk.{}.post_ffw_norm.{}"),
)
_PHI3 = (
    (_LAYER + r"self_attn\.qkv_proj\.(.*)", "blk.{}.attn_qkv.{}"),
    (_LAYER + r"mlp\.gate_up_proj\.(.*)", "blk.{}.ffn_up.{}"),
)
_STARCODER2 = (
    (_LAYER + r"mlp\.c_fc\.(.*)", "blk.{}.ffn_up.{}"),
    (_LAYER + r"mlp\.c_proj\.(.*)", "blk.{}.ffn_down.{}"),
)
# transformers has the experts' matrices of a layer in two tensors, of which the first is gate over up.
_EXPERTS = (
    (_LAYER + r"mlp\.gate\.(.*)", "blk.{}.ffn_gate_inp.{}"),
    (_LAYER + r"mlp\.experts\.gate_up_proj", "blk.{}.ffn_gate_exps.weight blk.{}.ffn_up_exps.weight"),
    (_LAYER + r"mlp\.experts\.down_proj", "blk.{}.ffn_down_exps.weight"),
    (_LAYER + r"mlp\.shared_expert\.(gate|up|down)_proj\.(.*)", "blk.{}.ffn_{}_shexp.{}"),
    (_LAYER + r"mlp\.shared_expert_gate\.(.*)", "blk.{}.ffn_gate_inp_shexp.{}"),
)
_GPT_OSS = (
    (_LAYER + r"post_attention_layernorm\.(.*)", "blk.{}.post_attention_norm.{}"),
    (_LAYER + r"self_attn\.sinks", "blk.{}.attn_sinks.weight"),
    (_LAYER + r"mlp\.router\.(.*)", "blk.{}.ffn_gate_inp.{}"),
    (_LAYER + r"mlp\.experts\.gate_up_proj", "blk.{}.ffn_gate_exps.weight blk.{}.ffn_up_exps.weight"),
    (_LAYER + r"mlp\.experts\.gate_up_proj_bias", "blk.{}.ffn_gate_exps.bias blk.{}.ffn_up_exps.bias"),
    (_LAYER + r"mlp\.experts\.down_proj", "blk.{}.ffn_down_exps.weight"),
    (_LAYER + r"mlp\.experts\.down_proj_bias", "blk.{}.ffn_down_exps.bias"),
)
_DENSE = (*_DECODER, *_NORM_BEFORE_MLP)
CONVERTERS: Mapping[str, Converter] = MappingProxyType(
    {
        "llama": Converter("llama", pairs=True),
        "mistral": Converter("llama", pairs=True),
        "qwen2": Converter("qwen2"),
        "qwen3": Converter("qwen3"),
        "gemma": Converter("gemma", added=1.0),
        "gemma2": Converter("gemma2", (*_DECODER, *_FOUR_NORMS), added=1.0, metadata=_gemma2),
        "gemma3_text": Converter("gemma3", (*_DECODER, *_FOUR_NORMS), added=1.0, metadata=_gemma3),
        "phi3": Converter("phi3", (*_DENSE, *_PHI3), metadata=_phi3),
        "starcoder2": Converter("starcoder2", (*_DENSE, *_STARCODER2), metadata=_starcoder2),
        "mixtral": Converter("llama", (*_DENSE, *_EXPERTS), pairs=True, metadata=_mixtral),
        "qwen2_moe": Converter("qwen2moe", (*_DENSE, *_EXPERTS), metadata=_qwen_experts),
        "qwen3_moe": Converter("qwen3moe", (*_DENSE, *_EXPERTS), metadata=_qwen_experts),
        "gpt_oss": Converter("gpt-oss", (*_DECODER, *_GPT_OSS), metadata=_gpt_oss, in_turn=True),
        "olmoe": Converter("olmoe", (*_DENSE, *_EXPERTS), metadata=_olmoe),
    }
)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Write a model, its matrices in a GGML type; what they stand for, by transformers' names.

    kinds: another type for some, by patterns of names in the file. add: more metadata. extra: tensors that are no
    parameters.
    """
    converter = CONVERTERS[model.config.model_type]
    writer = gguf.GGUFWriter(path, converter.architecture)
    add_sizes(writer, model.config)
    converter.metadata(writer, model.config)
    add(writer)
    meant: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        parts: list[Array] = []
        for there, values in _converted(converter, name, tensor, model.config):
            chosen = next((k for pattern, k in (kinds or {}).items() if re.search(pattern, there)), kind)
            is_matrix = values.ndim > 1 and "_inp" not in there and not there.endswith("bias")
            chosen = chosen if is_matrix else "F32"
            data, stands_for = in_blocks(values, chosen)
            writer.add_tensor(there, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
            parts.append(stands_for)
        joined = torch.from_numpy(_joined(parts, in_turn=converter.in_turn and ".experts." in name))
        meant[name] = _restored(converter, name, joined, model.config).view(tensor.shape)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.float().numpy())
    write_out(writer)
    return meant


def write_out(writer: gguf.GGUFWriter) -> None:
    """The file itself."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """What all decoders have."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def in_blocks(values: Array, kind: str) -> tuple[Array, Array]:
    """The bytes of a GGML type, and what they stand for. What the gguf package cannot quantize to is random: scales as
    large as the values, all other bits by chance."""
    number = gguf.GGMLQuantizationType[kind]
    data = _random_blocks(values, kind) if kind in SCALES_AT else quantize(values.astype(np.float32), number)
    shown = data if kind == "F16" else dequantize(data, number)
    return data, shown.astype(np.float32).reshape(values.shape)


# Where each type has its fp16 scales; IQ1_M has them bit by bit among others.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),
}


def set_scale(blocks: Array, kind: str, scale: float, at: int | None = None) -> None:
    """Write the fp16 scale of blocks [..., bytes], and of those that have one the scale of minima; only the one that
    begins `at` a byte where that is given."""
    half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    for place in SCALES_AT[kind] if at is None else (at,):
        blocks[..., place : place + 2] = half
    if kind == "IQ1_M":  # The high four bits of each of the last four numbers of 16 bits.
        for index, place in enumerate((49, 51, 53, 55)):
            nibble = half[index // 2] >> 4 * (index % 2) & 15
            blocks[..., place] = blocks[..., place] & 15 | nibble << 4


def _random_blocks(values: Array, kind: str) -> Array:
    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(int(np.abs(values).sum()))
    blocks = generator.integers(0, 256, (values.size // elements, nbytes), dtype=np.uint8)
    set_scale(blocks, kind, 1.0)
    spread = float(dequantize(blocks.reshape(1, -1), number).std())
    set_scale(blocks, kind, float(values.std()) / spread)
    return blocks.reshape(*values.shape[:-1], -1)


def names_in_file(converter: Converter, name: str) -> list[str]:
    """The names of the tensors that one tensor of the model becomes."""
    place, groups = next(
        (there, match.groups())
        for pattern, there in converter.names
        if (match := re.fullmatch(pattern, name)) is not None
    )
    return [part.format(*groups) for part in place.split()]


def _converted(converter: Converter, name: str, tensor: Tensor, config: Any) -> list[tuple[str, Array]]:
    """The tensors of the file that one of the model's becomes."""
    values = tensor.detach().float()
    heads = _heads(name, config) if converter.pairs else None
    if heads is not None:
        values = values.reshape(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    names = names_in_file(converter, name)
    if converter.in_turn and ".experts." in name:
        rows = values.transpose(1, 2) if values.dim() == 3 else values
        return [(stored_name, rows[:, i :: len(names)].contiguous().numpy()) for i, stored_name in enumerate(names)]
    if names[0].split(".")[-2].endswith("norm"):
        values = values + converter.added
    if "shared_expert_gate" in name:
        values = values.reshape(-1)
    return (
        list(zip(names, (part.numpy() for part in values.chunk(len(names), dim=1)), strict=True))
        if len(names) > 1
        else [(names[0], values.numpy())]
    )


def _joined(found: list[Array], *, in_turn: bool) -> Array:
    if not in_turn:
        return np.concatenate(found, axis=1) if len(found) > 1 else found[0].copy()
    rows = np.stack(found, 2).reshape(len(found[0]), -1, *found[0].shape[2:])
    return rows.swapaxes(1, 2).copy() if rows.ndim == 3 else rows


def _restored(converter: Converter, name: str, values: Tensor, config: Any) -> Tensor:
    heads = _heads(name, config) if converter.pairs else None
    if heads is not None:
        values = values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return values - converter.added if "norm" in name else values


def _heads(name: str, config: Any) -> int | None:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    """A byte-level tokenizer.json and its settings."""
    described = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ids: dict[str, int] = dict(described["model"]["vocab"])
    kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
    for added in described["added_tokens"]:
        ids[added["content"]] = added["id"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[ids[token]] for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]])
    for key, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(key) in ids:
            add(ids[settings[key]])
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def add_sentence_piece(
    writer: gguf.GGUFWriter, pieces: list[tuple[str, float, int]], *, begins_with_space: bool
) -> None:
    """pieces: with their scores and types, `<unk>` and the tokens for the beginning and the end first."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(begins_with_space)
