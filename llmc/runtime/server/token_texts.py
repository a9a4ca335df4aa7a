"""What a single token stands for: its bytes, and a text for log-probabilities, also where it is part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts of an engine's tokens by id; without a tokenizer a token is `token_id:17`, as in vLLM."""

    def __init__(self, engine: Path) -> None:
        self._path = engine / "tokenizer" / "tokenizer.json"
        self._fast: FastTokenizer | None = None
        if self._path.is_file():
            from tokenizers import Tokenizer as FastTokenizer

            self._fast = FastTokenizer.from_file(str(self._path))
            self._fast.no_truncation()
            self._fast.no_padding()
        self._bytes_of_letter = byte_alphabet()

    @lru_cache(maxsize=1 << 16)  # noqa: B019  (one object lives as long as the server)
    def text(self, token: int) -> str:
        """The token's text; `bytes:\\xe2\\x80` for one that is not whole characters, as in OpenAI's answers."""
        if self._fast is None:
            return f"token_id:{token}"
        text: str = self._fast.decode([token], skip_special_tokens=False)
        if _INCOMPLETE in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))
        return text or self._fast.id_to_token(token) or f"token_id:{token}"

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included; empty without a tokenizer."""
        text: str = "" if self._fast is None else self._fast.decode(list(tokens), skip_special_tokens=False)
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises RequestError without a tokenizer."""
        if self._fast is None:
            raise RequestError("the engine has no tokenizer", at="prompt", fix="send token ids (/v1/completions)")
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def is_special(self, text: str) -> bool:
        """Whether the text is a special token, which decoding leaves out."""
        added = {} if self._fast is None else self._fast.get_added_tokens_decoder()
        return any(token.content == text and token.special for token in added.values())

    def bytes(self, token: int) -> tuple[int, ...]:
        """The token's bytes in UTF-8."""
        if self._fast is None:
            return ()
        piece: str = self._fast.id_to_token(token) or ""
        single = _BYTE_TOKEN.fullmatch(piece)
        if single is not None:
            return (int(single[1], 16),)
        text: str = self._fast.decode([token], skip_special_tokens=False)
        if _INCOMPLETE in text and all(letter in self._bytes_of_letter for letter in piece):
            return tuple(self._bytes_of_letter[letter] for letter in piece)
        return tuple((text or piece).encode("utf-8", "replace"))


def byte_alphabet() -> dict[str, int]:
    """Which byte each letter of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
