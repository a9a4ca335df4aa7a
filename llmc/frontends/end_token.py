"""The end token that a tokenizer names. Often only the tokenizer's files of a chat model have it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmc.files.tokenizer_files import SETTINGS, SPECIAL_TOKENS
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.directory_files import read_json


def with_end_token(captured: Captured) -> Captured:
    """The capture, whose texts also end at the token that its tokenizer calls the end; a note tells what does not fit.

    generation_config.json and config.json of a base model that was tuned on chats often name its old end alone.
    """
    if captured.tokenizer is None:
        return captured
    from tokenizers import Tokenizer

    info, notes = captured.graph.info, captured.notes
    known = Tokenizer.from_file(str(captured.tokenizer))
    size = known.get_vocab_size()
    if size > info.vocab_size:
        notes += (f"the tokenizer has {size} tokens, the model {info.vocab_size}: it may not belong to it",)
    end = _end_token(captured.tokenizer_files)
    if end is not None:
        id = known.token_to_id(end)
        if id is None or id >= info.vocab_size:
            has = "the tokenizer has no such token" if id is None else f"its id, {id}, is not in the model's vocabulary"
            notes += (f"the tokenizer's settings call {end!r} the end of a text, and {has}: it is ignored",)
        elif id not in info.eos_token_ids:
            captured.graph.info = replace(info, eos_token_ids=(*info.eos_token_ids, id))
    return replace(captured, notes=notes)


def _end_token(files: Sequence[Path]) -> str | None:
    """The end token in tokenizer_config.json, or else in special_tokens_map.json."""
    for name in (SETTINGS, SPECIAL_TOKENS):
        for file in files:
            end = read_json(file).get("eos_token") if file.name == name else None
            end = end.get("content") if isinstance(end, dict) else end
            if isinstance(end, str):
                return end
    return None
