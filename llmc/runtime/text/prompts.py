"""Convert the user's prompts to checked token ids."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from llmc.errors import ContextLengthError, RequestError
from llmc.runtime.text.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt as vLLM has it. Where there are ids, they count, and the text is only said to be theirs."""

    prompt: str
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | PromptDict
Prompts = Prompt | Iterable[str] | Iterable[Sequence[int]] | Iterable[PromptDict]
_FIX = 'give a text, a list of int, {"prompt": text} or {"prompt_token_ids": ids}, or several of these'


def token_sequences(
    prompts: Prompts, tokenizer: Tokenizer, prepare: Callable[[Any], Any] = lambda prompt: prompt
) -> list[list[int]]:
    """Token ids of one prompt or several, none for an empty list. prepare: converts a prompt to the form that the model
    reads. Raises RequestError if it is not a prompt."""
    items, is_one = as_list(prompts)
    return [] if is_one and items == [[]] else [token_ids(prepare(prompt), tokenizer) for prompt in items]


def as_list(prompts: Prompts) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether a single prompt was given. An empty list is a prompt without tokens."""
    plain = _plain(prompts)
    if isinstance(plain, str | Mapping):
        return [plain], True
    items = _items(plain)  # Once: an iterator gives each item only once.
    is_one = not any(isinstance(item, str | Iterable) or item is None for item in items)
    return ([items] if is_one else items), is_one


def token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of one prompt. Raises RequestError for anything else."""
    plain = _plain(prompt)
    if isinstance(plain, str):
        return tokenizer.encode(plain)
    if isinstance(plain, Mapping):
        return token_ids(_content(plain), tokenizer)
    return [_token_id(item) for item in _items(plain)]


def check_length(where: str, tokens: Sequence[int], limit: int, purpose: str) -> None:
    """Raise RequestError for no tokens, ContextLengthError for more than `limit`.

    where: names the prompt. purpose: what else the limit leaves room for.
    """
    if not tokens:
        raise RequestError(
            "the prompt is empty", at=where, fix="give at least one token, such as the model's bos token"
        )
    if len(tokens) > limit:
        raise ContextLengthError(
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


def _content(prompt: Mapping[str, Any]) -> Any:
    """The prompt in a dict."""
    unknown = [key for key in prompt if key not in PromptDict.__annotations__]
    if unknown:
        is_message = "role" in prompt and "content" in prompt
        raise RequestError(
            f"a prompt has no {unknown[0]!r}: {dict(prompt)!r:.80}",
            fix="give messages to chat(messages)" if is_message else _FIX,
        )
    for key, kind in (("prompt_token_ids", Iterable), ("prompt", str)):
        value = prompt.get(key)
        if value is not None:
            if not isinstance(value, kind) or (kind is Iterable and isinstance(value, str | bytes | Mapping)):
                raise RequestError(f"{key} cannot be {value!r:.80} ({type(value).__name__})", at=key, fix=_FIX)
            return value
    raise RequestError(f"a prompt has neither text nor ids: {dict(prompt)!r:.80}", fix=_FIX)


def _plain(value: Any) -> Any:
    """Convert arrays and tensors to lists, whose items are then checked."""
    return value.tolist() if hasattr(value, "tolist") else value


def _items(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"a prompt cannot be {value!r:.80} ({type(value).__name__})", fix=_FIX)
    return [_plain(item) for item in value]


def _token_id(item: Any) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except TypeError:
        raise RequestError(
            f"a token id must be a whole number, not {item!r:.80} ({type(item).__name__})", fix=_FIX
        ) from None
