"""What the user may give as prompts, turned into checked token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from llmc.errors import RequestError
from llmc.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]]


def token_sequences(prompts: Prompts, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of one prompt or several, each a text or a sequence of ids. Raises RequestError for anything else."""
    return [token_ids(prompt, tokenizer) for prompt in _as_list(prompts)]


def token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of one prompt, a text or a sequence of ids. Raises RequestError for anything else."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    _require_iterable(prompt)
    return [_token_id(item) for item in prompt]


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt: a text, or a sequence of numbers."""
    if isinstance(prompts, str):
        return True
    _require_iterable(prompts)
    return not any(isinstance(item, str | Iterable) for item in prompts)


def check_length(where: str, tokens: Sequence[int], limit: int, purpose: str) -> None:
    """Raise RequestError for no tokens or more than `limit`. where: names the prompt. purpose: what else
    the limit leaves room for.
    """
    if not tokens:
        raise RequestError(
            "the prompt is empty", at=where, fix="give at least one token, such as the model's bos token"
        )
    if len(tokens) > limit:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, this engine takes at most {limit}{purpose}",
            at=where,
            fix="shorten the prompt, or rebuild the engine with a larger max_model_len",
        )


def check_ids(where: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} is out of range: the model has ids 0 to {vocab_size - 1}",
                at=where,
                fix="use the tokenizer that belongs to this model",
            )


def _as_list(prompts: Prompts) -> list[Any]:
    return [prompts] if is_single(prompts) else list(prompts)


def _token_id(item: Any) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except TypeError:
        raise RequestError(
            f"a token id must be a whole number, not {item!r} ({type(item).__name__})",
            fix="give a text, a list of int, or a list of either",
        ) from None


def _require_iterable(value: Any) -> None:
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise RequestError(
            f"a prompt cannot be {value!r:.80} ({type(value).__name__})",
            fix="give a text, a list of int, or a list of either",
        )
