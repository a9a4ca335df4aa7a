"""Tokenizers of GGUF files give the ids of the tokenizers that they were made from, and the same text back."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import read_model
from llmc.frontends.gguf.model_directory import chat_templates
from llmc.frontends.gguf.tokenizer import tokenizer_of
from llmc.frontends.gguf.vocabulary import Vocabulary, read_vocabulary
from tests.gguf_files import add_sentence_piece, add_tokenizer, write_out

DATA = Path(__file__).parents[3] / "examples" / "data"
TEXTS = (
    "KING RICHARD:\nWhat, is he dead?\n\n\nI'LL say so; it's 1485, 22.5%!",
    "  leading, trailing  \t\r\n\r\n and/or // /*code*/ x=1;\n",
    "Ünïcödé: é é 日本語 Ελληνικά ١٢٣ \U0001f600 HelloWorld iPhone",
    "<|bos|>special<|eos|> <tool>defined</tool>",
    "",
)
# As in the models' own tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _split(pattern: str) -> Any:
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytewise])


_PRE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "gpt-4o": _split(_O200K),
    "starcoder": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def _trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(DATA / "heldout.txt").read_text()[:30000], *TEXTS], trainer)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B:1", special_tokens=[("<|bos|>", 0)]
        )
    return tokenizer


def _read(path: Path) -> Vocabulary:
    return read_vocabulary(read_model((path,)).metadata, 1 << 20)


@pytest.mark.parametrize("pre", _PRE)
def test_byte_level_ids_are_the_same(pre: str, tmp_path: Path) -> None:
    expected = _trained(pre)
    expected.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": pre == "llama-bpe"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    add_tokenizer(writer, tmp_path, pre)
    write_out(writer)
    vocabulary = _read(tmp_path / "t.gguf")
    actual = tokenizer_of(vocabulary)
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert actual.encode(text).ids == ids
        assert actual.decode(ids) == expected.decode(ids)
    assert vocabulary.ends() == (1,)


def _sentence_piece(begins_with_space: bool) -> tuple[Tokenizer, list[tuple[str, float, int]]]:
    """A BPE with bytes to fall back on, as transformers makes it of SentencePiece's; its pieces, scores and types."""
    converters: Any = import_module("transformers.convert_slow_tokenizer")  # which defines it, or imports it

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        [(DATA / "heldout.txt").read_text()[:30000]], trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    learned = trained.get_vocab()
    made = sorted(learned, key=lambda token: learned[token])
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<|bos|>", 0.0, 3), ("<|eos|>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(token, -float(number), 1) for number, token in enumerate(made)]
    ids = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, _ in pieces}
    merges = converters.generate_merges(ids, scores, {"<unk>", "<|bos|>", "<|eos|>"})
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B:1", special_tokens=[("<|bos|>", 1)]
    )
    return tokenizer, pieces


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_sentence_piece_ids_are_the_same(begins_with_space: bool, tmp_path: Path) -> None:
    expected, pieces = _sentence_piece(begins_with_space)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    add_sentence_piece(writer, pieces, begins_with_space=begins_with_space)
    write_out(writer)
    actual = tokenizer_of(_read(tmp_path / "t.gguf"))
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert actual.encode(text).ids == ids
        assert actual.decode(ids) == expected.decode(ids)
    assert actual.decode(actual.encode(TEXTS[2]).ids) == TEXTS[2]


def test_an_unknown_way_to_cut_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("klingon")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    write_out(writer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre = 'klingon'") as caught:
        tokenizer_of(_read(tmp_path / "t.gguf"))
    assert "qwen2" in str(caught.value.fix)


def test_a_merge_of_what_is_no_token_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a b"])
    write_out(writer)
    with pytest.raises(CheckpointError, match="merges is 'a b', not two tokens"):
        tokenizer_of(_read(tmp_path / "t.gguf"))


@pytest.mark.parametrize("named", [False, True])
def test_chat_templates_come_with_their_names(named: bool, tmp_path: Path) -> None:
    _trained("gpt-2").save(str(tmp_path / "tokenizer.json"))
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    templates = listed if named else "D"
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    add_tokenizer(writer, tmp_path, "gpt-2")
    write_out(writer)
    assert chat_templates(read_model((tmp_path / "t.gguf",)).metadata) == templates
