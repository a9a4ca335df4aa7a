"""The shipped tokenizer with <|bos|> before every text, as the tokenizers of Gemma and Llama 3 have it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.cli.command import MODEL

BOS = 0


def write_prefixed_tokenizer(path: Path, bos: int = BOS) -> Tokenizer:
    """Write its tokenizer.json to a path. bos: the id of the token before a text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    special = [("<|bos|>", bos)]
    tokenizer.post_processor = TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", special_tokens=special)
    tokenizer.save(str(path))
    return tokenizer
