"""tokenizer.json for llguidance, which takes every added token in angle brackets for a special one.

Qwen's <tool_call> and </think> are none: they are text, which an output shows and a grammar may spell. As words of the
vocabulary they would count as text.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any


def with_plain_tokens(text: str, ends: Collection[int]) -> str:
    """Move the added tokens of a tokenizer.json that are not special to its words, and return its text.

    ends: ids of tokens that end an output, which are not text either.
    """
    at = text.find('"added_tokens"')
    if at < 0 or ('"special": false' not in text[at:] and '"special":false' not in text[at:]):
        return text
    config = json.loads(text)
    model, added = config.get("model"), config.get("added_tokens")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(added, list):
        return text
    vocabulary: dict[str, int] = model["vocab"]
    spaces = _space(config.get("decoder"))
    left = []
    for token in added:
        # Special ones keep their ids only as words, since others are counted from the vocabulary's size.
        is_special = token["special"] or token["id"] in ends
        word = token["content"] if is_special else _word(token["content"], spaces)
        if vocabulary.setdefault(word, token["id"]) != token["id"] or is_special:
            left.append(token)
    config["added_tokens"] = left
    return json.dumps(config)


def _space(decoder: Any) -> str:
    """Return the vocabulary's spelling of a space: byte-level ones have a character per byte, and SentencePiece has one
    for it."""
    decoders = [decoder, *decoder.get("decoders", ())] if isinstance(decoder, Mapping) else []
    return "" if any(part.get("type") == "ByteLevel" for part in decoders if part) else "▁"


def _word(content: str, space: str) -> str:
    if space:
        return content.replace(" ", space)
    from tokenizers.pre_tokenizers import ByteLevel

    return "".join(word for word, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(content))
