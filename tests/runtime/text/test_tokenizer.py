"""The tokenizer's view of single tokens: bytes that, joined, are the text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from llmc.runtime.server.text_offsets import prompt_offsets
from llmc.runtime.text.tokenizer import Tokenizer
from tests.listed_files import listed_files

BARD = Path(__file__).parent.parent.parent.parent / "examples/models/bard-6m/tokenizer.json"


def tokenizer_at(path: Path, text: str) -> Tokenizer:
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "tokenizer.json").write_text(text, encoding="utf-8")
    return Tokenizer(listed_files(path))


@pytest.mark.parametrize("text", ["Once upon a time", "naïve café — 東京 🙂", "\n\ttabs  and   spaces"])
def test_byte_level_tokens_join_to_the_text(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_at(tmp_path, BARD.read_text(encoding="utf-8"))
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_sentence_piece_tokens_are_spaces_and_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xE6>": 2, "é": 3}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "byte_fallback": True},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    tokenizer = tokenizer_at(tmp_path, json.dumps(content))
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3, 99)] == [b" the", b"\xe6", "é".encode(), b""]


def test_without_a_tokenizer_tokens_have_no_bytes(tmp_path: Path) -> None:
    assert Tokenizer(listed_files(tmp_path)).token_bytes(5) == b""


def test_few_of_the_texts_that_were_looked_for_are_kept(tmp_path: Path) -> None:
    tokenizer = tokenizer_at(tmp_path, BARD.read_text(encoding="utf-8"))
    tokens = tokenizer.tokens_containing("king")
    assert tokens and all(b"king" in tokenizer.token_bytes(token) for token in tokens)
    for number in range(300):
        tokenizer.tokens_containing(f"none has {number}")
    assert len(tokenizer._containing) <= 256
    assert tokenizer.tokens_containing("king") == tokens


def test_cut_texts_keep_their_special_ends(tmp_path: Path) -> None:
    words = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"))}
    fast = FastTokenizer(WordLevel(words, unk_token="[UNK]"))
    fast.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    fast.pre_tokenizer = Whitespace()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    fast.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", special_tokens=ends)
    tokenizer = tokenizer_at(tmp_path, fast.to_str())
    ids = tokenizer.encode("a b c d")
    assert tokenizer.cut(ids, 6) == ids == [1, 3, 4, 5, 6, 2]
    assert tokenizer.cut(ids, 4) == [1, 3, 4, 2] and tokenizer.cut(ids, 4, keeps_start=False) == [1, 5, 6, 2]
    assert tokenizer.cut(tokenizer.encode("a", "b c"), 5) == [1, 3, 2, 4, 2]
    assert tokenizer.cut([3, 4, 5], 2) == [3, 4] and tokenizer.cut([3, 4, 5], 2, keeps_start=False) == [4, 5]
    assert tokenizer.cut(ids, 2) == [1, 3], "nothing of the text would be left"
    assert tokenizer.prefix == [1]


def test_a_tokenizer_without_special_tokens_has_no_prefix(tmp_path: Path) -> None:
    assert tokenizer_at(tmp_path, BARD.read_text(encoding="utf-8")).prefix == []
    assert Tokenizer(listed_files(tmp_path / "without")).prefix == []


def test_a_pair_encoder_gives_what_pairs_encode_to(tmp_path: Path) -> None:
    """With special tokens around and between, and with texts that take another way because they are long."""
    fast = FastTokenizer.from_file(str(BARD))
    fast.post_processor = TemplateProcessing(
        single="$A <|bos|>", pair="<|bos|> $A <|bos|> $B:1 <|bos|>:1", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer = tokenizer_at(tmp_path, fast.to_str())
    texts = ["", "The king", "é😀 ", "x" * 3000, "The king shall come. " * 200]
    for text in texts:
        encode = tokenizer.pair_encoder(text)
        for pair in texts:
            assert encode(pair) == tokenizer.encode(text, pair) == fast.encode(text, pair).ids
        assert tokenizer.encode(text) == fast.encode(text).ids
    assert tokenizer.longest_token == max(len(tokenizer.token_bytes(i)) for i in range(4096)) == 32


def test_offsets_of_a_prompt_skip_special_tokens_that_its_text_has_not(tmp_path: Path) -> None:
    fast = FastTokenizer.from_file(str(BARD))
    fast.post_processor = TemplateProcessing(single="<|bos|> $A <|bos|>", special_tokens=[("<|bos|>", 0)])
    tokenizer = tokenizer_at(tmp_path, fast.to_str())
    for text in ("The kïng", "The <|bos|> 🙂", "東 <|bos|>"):
        ids = tokenizer.encode(text)
        offsets = prompt_offsets(tokenizer, text, ids)
        assert ids[0] == ids[-1] == 0 and (offsets[0], offsets[-1]) == (0, len(text))
        places = [*offsets[1:-1], len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(places)]
        assert "".join(pieces) == text
        for token, piece in zip(ids[1:-1], pieces, strict=True):
            assert piece.encode().endswith(tokenizer.token_bytes(token)) or not piece
