"""A vocabulary of letters, for what edits logits by texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.engine_format import EngineFiles
from llmc.runtime.text.tokenizer import Tokenizer

VOCAB = 12
NO_IDS = np.zeros(0, np.int64)
NO_FILES = EngineFiles(Path("nowhere"), {})
Row = npt.NDArray[np.float32]


class Letters(Tokenizer):
    """Every letter is a token: a is 0, b is 1, …; a space is nothing."""

    def __init__(self, engine: EngineFiles = NO_FILES) -> None:
        super().__init__(engine)
        self.exists = True

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter != " "]

    @property
    def _vocabulary_bytes(self) -> list[bytes]:
        return [bytes([ord("a") + i]) for i in range(VOCAB)]


class NoTokenizer(Tokenizer):
    def __init__(self) -> None:
        super().__init__(NO_FILES)


def double_or_ban(ids: list[int], logits: Row) -> Row:
    """Depends on all it is given."""
    changed = logits * np.float32(2)
    changed[ids[-1]] = -np.inf
    return changed
