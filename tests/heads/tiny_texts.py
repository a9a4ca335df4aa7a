"""Tiny models with seeded weights that give rows of texts, the texts that they read, and what transformers gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LONG = {**_SIZES, "max_position_embeddings": 96}
_BERT = {**_LONG, "pad_token_id": 1}
# By name: the class, and the settings of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Model", {**_LONG, "num_key_value_heads": 2, "head_dim": 8}),
    "qwen3-labels": (
        "Qwen3ForSequenceClassification",
        {**_LONG, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 3, "pad_token_id": None},
    ),
    "bert": ("BertModel", _LONG),
    "bert-labels": ("BertForSequenceClassification", {**_LONG, "num_labels": 3}),
    "roberta": ("RobertaModel", {**_BERT, "type_vocab_size": 1}),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**_BERT, "type_vocab_size": 1, "num_labels": 1}),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": 160, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 96},
    ),
    "gte": ("GteModel", _LONG),
    "nomic_bert": ("NomicBertModel", _LONG),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", _LONG),
    "electra": ("ElectraModel", {**_LONG, "embedding_size": 16}),
    "modernbert": (
        "ModernBertModel",
        {
            **_LONG,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        },
    ),
    "modernbert-labels": (
        "ModernBertForSequenceClassification",
        {
            **_LONG,
            "local_attention": 8,
            "num_labels": 2,
            "classifier_pooling": "mean",
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        },
    ),
}
LENGTHS = (1, 7, 33, 70)


def tiny_model(name: str) -> Any:
    """In fp32 and evaluation mode, with weights that are far from those of initialization."""
    import transformers

    class_name, settings = MODELS[name]
    model_class: Any = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Token ids without special ones."""
    return [np.random.default_rng(length).integers(5, 160, length).tolist() for length in lengths]


def rows_of(model: Any, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Of each text by itself: what a classifier gives, the last token's state of a decoder, or an encoder's mean."""
    rows = []
    for tokens in sequences:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([tokens]))
        if hasattr(output, "logits"):
            rows.append(output.logits[0])
        else:
            states = output.last_hidden_state[0]
            rows.append(states[-1] if model.config.model_type == "qwen3" else states.mean(0))
    return torch.stack(rows).float().numpy()


def least_cosine(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """Of rows at the same place."""
    one, other = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / norms).min())
