"""Text to token ids and back, from the engine's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import EngineFormatError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


class Tokenizer:
    """The tokenizer of an engine directory, read on first use; an engine may have none."""

    def __init__(self, engine: Path) -> None:
        self._path = engine / "tokenizer" / "tokenizer.json"

    @cached_property
    def exists(self) -> bool:
        """Whether the engine has a tokenizer."""
        return self._path.exists()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. Raises RequestError without one."""
        if not self.exists:
            raise RequestError(
                "the prompt is text, but the engine has no tokenizer",
                at=self._path,
                fix="give token ids (a list of int), or rebuild from a model directory with a tokenizer.json",
            )
        ids: list[int] = self._fast.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; empty if the engine has no tokenizer."""
        if not self.exists:
            return ""
        text: str = self._fast.decode(ids, skip_special_tokens=True)
        return text

    @cached_property
    def _fast(self) -> FastTokenizer:
        from tokenizers import Tokenizer as FastTokenizer

        # The library raises a bare Exception for a file that it cannot parse.
        try:
            tokenizer: FastTokenizer = FastTokenizer.from_file(str(self._path))
        except Exception as error:
            raise EngineFormatError(
                f"the tokenizer cannot be read: {error}",
                at=self._path,
                fix="rebuild the engine from a model directory with a valid tokenizer.json",
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
