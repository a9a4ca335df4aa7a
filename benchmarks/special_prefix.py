"""The special tokens in front of a text, such as <bos>: a model that was trained with them predicts worse without."""

from __future__ import annotations

from tokenizers import Tokenizer


def special_prefix(tokenizer: Tokenizer) -> list[int]:
    """Ids of the special tokens that a tokenizer puts before a text, without those behind it."""
    encoded = tokenizer.encode("a")
    prefix: list[int] = encoded.ids[: encoded.special_tokens_mask.index(0)]
    return prefix
