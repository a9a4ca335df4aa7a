"""Text to token ids and back, from the engine's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.engine_format import EngineFiles
from llmc.errors import EngineFormatError, RequestError

TOKENIZER_NAME = "tokenizer/tokenizer.json"

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as FastTokenizer

_KEPT_TEXTS = 256
# Longer texts take long enough that other threads should run meanwhile.
_LONG_CHARACTERS = 1024


class Tokenizer:
    """The tokenizer of an engine directory, read on first use; an engine may have none. path: the path of
    tokenizer.json."""

    def __init__(self, engine: EngineFiles) -> None:
        self.path = engine.path / TOKENIZER_NAME
        self._files = engine
        self._containing: dict[str, frozenset[int]] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer {self.path}{'' if self.exists else ', which does not exist'}>"

    @cached_property
    def exists(self) -> bool:
        """Whether the engine has a tokenizer."""
        return TOKENIZER_NAME in self._files

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. Raises RequestError without one.

        pair: a second text, put together with the first as the tokenizer does it.
        """
        return self._encoding(text, pair, add_special_tokens).ids

    def pair_encoder(self, text: str) -> Callable[[str], list[int]]:
        """Return a function that gives the ids of the text and another one, as `encode` does; its first call tokenizes
        the text."""
        first: list[Encoding] = []

        def encode(pair: str) -> list[int]:
            if not first:
                first.append(self._encoding(text, None, False))
            ids: list[int] = self._fast.post_process(first[0], self._encoding(pair, None, False)).ids
            return ids

        return encode

    def _encoding(self, text: str, pair: str | None, add_special_tokens: bool) -> Encoding:
        self._check_exists()
        try:
            if len(text) + len(pair or "") < _LONG_CHARACTERS:
                return self._fast.encode(text, pair, add_special_tokens=add_special_tokens)
            input_: Any = text if pair is None else (text, pair)
            # With several texts the library lets other threads run, which it does not with one.
            return self._fast.encode_batch([input_], add_special_tokens=add_special_tokens)[0]
        except TypeError:
            raise RequestError(
                f"the text cannot be written as UTF-8: {text!r:.80}", fix="leave out surrogates such as '\\ud800'"
            ) from None

    def _check_exists(self) -> None:
        if not self.exists:
            raise RequestError(
                "the prompt is text, but the engine has no tokenizer",
                at=self.path,
                fix="give token ids (a list of int), or rebuild from a model directory with a tokenizer.json",
            )

    def cut(self, ids: Sequence[int], most: int, *, keeps_start: bool = True) -> list[int]:
        """The first tokens of a text (or the last), with the special tokens that the tokenizer puts around texts."""
        kept = list(ids)
        if len(kept) <= most:
            return kept
        before, after = self._special_ends
        has_ends = kept[: len(before)] == before and kept[len(kept) - len(after) :] == after
        room = most - len(before) - len(after)
        if not has_ends or room <= 0:
            return kept[:most] if keeps_start else kept[-most:]
        text = kept[len(before) : len(kept) - len(after)]
        return [*before, *(text[:room] if keeps_start else text[-room:]), *after]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; empty if the engine has no tokenizer."""
        if not self.exists:
            return ""
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self) -> list[str | None]:
        """Return the tokens by id, as tokenizer.json has them; None for an id that it leaves out."""
        return [self._fast.id_to_token(i) for i in range(self._fast.get_vocab_size())] if self.exists else []

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text, which need not be whole characters."""
        return self._vocabulary_bytes[token_id] if 0 <= token_id < len(self._vocabulary_bytes) else b""

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The tokens that `decode` leaves out unless told otherwise, and their texts."""
        added = self._fast.get_added_tokens_decoder() if self.exists else {}
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def longest_token(self) -> int:
        """The most characters that a token stands for inside a text; 0 without a tokenizer."""
        return max(map(len, self._vocabulary_bytes), default=0)

    def tokens_containing(self, text: str) -> frozenset[int]:
        """The tokens whose bytes contain those of the text. The latest answers are kept, because it reads every
        token."""
        tokens = self._containing.get(text)
        if tokens is None:
            wanted = text.encode()
            tokens = frozenset(i for i, content in enumerate(self._vocabulary_bytes) if wanted in content)
            if len(self._containing) >= _KEPT_TEXTS:
                self._containing.clear()
            self._containing[text] = tokens
        return tokens

    @property
    def prefix(self) -> list[int]:
        """Ids of the special tokens that the tokenizer puts before a text, such as <bos>; empty if it puts none."""
        return list(self._special_ends[0])

    @cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        if not self.exists:
            return [], []
        encoded = self._fast.encode("a")
        own = encoded.special_tokens_mask.index(0) if 0 in encoded.special_tokens_mask else len(encoded.ids)
        count = encoded.special_tokens_mask.count(0)
        return encoded.ids[:own], encoded.ids[own + count :]

    @cached_property
    def _vocabulary_bytes(self) -> list[bytes]:
        if not self.exists:
            return []
        fast = self._fast
        decoder = json.loads(fast.to_str()).get("decoder") or {}
        kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
        added = fast.get_added_tokens_decoder()
        is_byte_level = "ByteLevel" in kinds
        texts = [fast.id_to_token(i) or "" for i in range(fast.get_vocab_size())]
        return [
            text.encode() if i in added else _byte_level(text) if is_byte_level else _sentence_piece(text)
            for i, text in enumerate(texts)
        ]

    @cached_property
    def _fast(self) -> FastTokenizer:
        from tokenizers import Tokenizer as FastTokenizer

        content = self._files.read(TOKENIZER_NAME)
        # The library raises a bare Exception for a file that it cannot parse.
        try:
            tokenizer: FastTokenizer = FastTokenizer.from_buffer(content)
        except Exception as error:
            raise EngineFormatError(
                f"the tokenizer cannot be read: {error}",
                at=self.path,
                fix="rebuild the engine from a model directory with a valid tokenizer.json",
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _byte_level(text: str) -> bytes:
    """A token of GPT-2's byte-level alphabet, in which every byte is written as a printable character."""
    return bytes(_BYTE_OF_CHARACTER[c] for c in text if c in _BYTE_OF_CHARACTER)


def _sentence_piece(text: str) -> bytes:
    """A token of SentencePiece's alphabet: ▁ is a space, <0x0A> a byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes((int(text[3:5], 16),))
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
