"""Added tokens that are not special are text in grammars, whatever they look like; special ones are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmc.runtime.grammar.grammar import TOKENS_AS_THEY_COME
from llmc.runtime.grammar.matcher import grammar_tokenizer, new_matcher
from llmc.runtime.grammar.plain_tokens import with_plain_tokens

ADDED = ("<tool_call>", "</a b>", "é>")


def written(path: Path, *, byte_level: bool, special: bool) -> dict[str, int]:
    """A tokenizer of bytes or characters, with an end token and added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else ["▁", *"abcdeé<>/_tolx"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    pieces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.decoder = decoders.ByteLevel() if byte_level else pieces
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    added = [AddedToken(text, special=special, normalized=False) for text in ADDED]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(str(path))
    return tokenizer.get_vocab()


@pytest.mark.parametrize("byte_level", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_what_is_text(tmp_path: Path, byte_level: bool, special: bool) -> None:
    path = tmp_path / "tokenizer.json"
    ids = written(path, byte_level=byte_level, special=special)
    end = ids["<|end|>"]
    opened = grammar_tokenizer(path, len(ids), (end,))
    assert opened.eos_tokens == [end] and opened.decode_bytes([end]) == b"<|end|>"
    for text in ADDED:
        assert opened.decode_bytes([ids[text]]).decode() == text
        # In pieces, so that nothing depends on how the grammar's text is split.
        pieces = " ".join(json.dumps(piece) for piece in (text[:2], text[2:], "x") if piece)
        lark = f"{TOKENS_AS_THEY_COME}\nstart: {pieces}"
        matcher = new_matcher(opened, json.dumps({"grammars": [{"lark_grammar": lark}]}))
        assert matcher.validate_tokens([ids[text]]) == (0 if special else 1)


def test_others_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    written(path, byte_level=True, special=True)
    assert with_plain_tokens(path.read_text(), ()) == path.read_text()
    unigram = '{"added_tokens": [{"special": false}], "model": {"type": "Unigram"}}'
    assert with_plain_tokens(unigram, ()) == unigram
