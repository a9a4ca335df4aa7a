"""Metadata of a decoder, converted to the keys of a transformers config.json."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.metadata import Metadata
from llmc.frontends.gguf.placement import Names

_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Described:
    """A GGUF model in transformers' terms. config: The content of config.json. names: The names of its tensors."""

    config: Mapping[str, Any]
    names: Names


@dataclass(frozen=True)
class Sizes:
    """The sizes that every decoder has. hyper: The architecture's other metadata."""

    hyper: Metadata
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int


def sizes_of(model: GgufModel) -> Sizes:
    """The sizes of a decoder, read from the metadata and the table of tensors. Raises CheckpointError if the two
    disagree."""
    hyper = model.metadata.of(model.metadata.text("general.architecture") + ".")
    embedding = model.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        shape = "has no" if embedding is None else f"holds {list(embedding.shape)} as"
        raise CheckpointError(f"the file {shape} {EMBEDDING}", at=model.path, fix="name a file of a language model")
    vocabulary, hidden = embedding.shape
    heads = hyper.whole("attention.head_count")
    layers = hyper.whole("block_count")
    _agree(model, hyper, "embedding_length", hidden, f"{EMBEDDING} has columns")
    # At most as large as the table of tensors allows, so that later loops are bounded.
    numbered = {name.split(".")[1] for name in model.tensors if name.startswith("blk.") and name.count(".") > 1}
    _agree(model, hyper, "block_count", len(numbered), "layers have tensors")
    if heads < 1:
        raise hyper.error("attention.head_count", heads, "a number of heads")
    return Sizes(
        hyper=hyper,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=hyper.whole("attention.head_count_kv", default=heads),
        head_dim=hyper.whole("attention.key_length", default=hidden // heads),
        vocabulary=vocabulary,
        positions=hyper.whole("context_length"),
    )


def decoder_config(model: GgufModel, sizes: Sizes, model_type: str, class_name: str) -> dict[str, Any]:
    """The common part of the configs of decoders. class_name: the model's class in transformers."""
    value_dim = sizes.hyper.whole("attention.value_length", default=sizes.head_dim)
    if value_dim != sizes.head_dim:
        raise sizes.hyper.error("attention.value_length", value_dim, f"{sizes.head_dim}, as keys have")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.hyper.whole("feed_forward_length", default=0),
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.positions,
        "tie_word_embeddings": HEAD not in model.tensors,
        "dtype": dtype_name(model),
        **_token_ids(model.metadata, sizes.vocabulary),
    }


def has_bias(model: GgufModel, part: str) -> bool:
    """Whether that part of layers has one."""
    return f"blk.0.{part}.bias" in model.tensors


def dtype_name(model: GgufModel) -> str:
    """The torch name of the dtype of most matrices; bfloat16 if they are codes."""
    elements: Counter[str] = Counter()
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            elements[_DTYPES.get(tensor.type.name, "bfloat16")] += math.prod(tensor.shape)
    return max(elements, key=lambda name: elements[name], default="float32")


def _token_ids(metadata: Metadata, vocabulary: int) -> dict[str, int | None]:
    """The ids of the begin, end and padding tokens; null if the file names none, or one outside the vocabulary."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids: dict[str, int | None] = {}
    for name, key in keys.items():
        key = f"tokenizer.ggml.{key}_token_id"
        number = metadata.whole(key) if metadata.has(key) else None
        ids[name] = number if number is not None and number < vocabulary else None
    return ids


def _agree(model: GgufModel, hyper: Metadata, key: str, actual: int, what: str) -> None:
    stated = hyper.whole(key)
    if stated != actual:
        raise CheckpointError(
            f"metadata {hyper.prefix}{key} is {stated}, where {actual} {what}",
            at=model.path,
            fix="download the file again, and all of them if the model is split",
        )
