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


CONVERTERS: Mapping[str, Converter] = MappingProxyType(
    {
        "llama": Converter("llama", pairs=True),
        "qwen2": Converter("qwen2"),
        "qwen3": Converter("qwen3"),
    }
)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, Tensor]:
    """Write a model, its matrices in a GGML type; what they stand for, by transformers' names.

    kinds: another type for some, by patterns of names in the file. add: more metadata.
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
        values, there = _converted(converter, name, tensor, model.config)
        chosen = next((k for pattern, k in (kinds or {}).items() if re.search(pattern, there)), kind)
        chosen = chosen if values.ndim > 1 else "F32"
        data, stands_for = in_blocks(values, chosen)
        writer.add_tensor(there, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
        meant[name] = _restored(converter, name, torch.from_numpy(stands_for.copy()), model.config)
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
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta"))
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def in_blocks(values: Array, kind: str) -> tuple[Array, Array]:
    """The bytes of a GGML type, and what they stand for. What the gguf package cannot quantize to is random: scales as
    large as the values, all other bits by chance."""
    number = gguf.GGMLQuantizationType[kind]
    data = _random_blocks(values, kind) if kind in _SCALES_AT else quantize(values.astype(np.float32), number)
    shown = data if kind == "F16" else dequantize(data, number)
    return data, shown.astype(np.float32).reshape(values.shape)


# Where each type has its fp16 scales.
_SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
}


def _random_blocks(values: Array, kind: str) -> Array:
    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(int(np.abs(values).sum()))
    blocks = generator.integers(0, 256, (values.size // elements, nbytes), dtype=np.uint8)
    for at in _SCALES_AT[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(1.0).tobytes(), np.uint8)
    spread = float(dequantize(blocks.reshape(1, -1), number).std())
    scale = np.float16(float(values.std()) / spread)
    for at in _SCALES_AT[kind]:
        blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _converted(converter: Converter, name: str, tensor: Tensor, config: Any) -> tuple[Array, str]:
    for pattern, there in converter.names:
        found = re.fullmatch(pattern, name)
        if found is not None:
            values = tensor.detach().float()
            heads = _heads(name, config) if converter.pairs else None
            if heads is not None:
                values = values.reshape(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
            if there.format(*found.groups()).split(".")[-2].endswith("norm"):
                values = values + converter.added
            return values.numpy(), there.format(*found.groups())
    raise KeyError(name)


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
