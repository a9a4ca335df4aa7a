"""Marks of thoughts and calls in a tokenizer: text, or special tokens, which are not text."""

from collections.abc import Iterable

from llmc.runtime.grammar.grammar import Mark, Marks
from llmc.runtime.text.tokenizer import Tokenizer


class MarkTexts:
    """Spells marks for one tokenizer; whether they are special is kept, since a model has few of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special: dict[str, bool] = {}

    def are_special(self, marks: Iterable[str]) -> bool:
        """Whether decoding leaves out a part of any of them."""
        return any(self._is_special(mark) for mark in marks)

    def spelled(self, text: str) -> Marks:
        """The text in pieces: special tokens as their ids, and what is between them."""
        if not text or not self._tokenizer.exists:
            return (text,) if text else ()
        pieces: list[Mark] = []
        at = 0
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            name = self._tokenizer.special_tokens.get(token)
            start = text.find(name, at) if name else -1
            if name and start >= 0:
                pieces += [text[at:start], token] if start > at else [token]
                at = start + len(name)
        return tuple([*pieces, text[at:]] if at < len(text) else pieces)

    def _is_special(self, mark: str) -> bool:
        if mark not in self._special:
            self._special[mark] = any(isinstance(part, int) for part in self.spelled(mark))
        return self._special[mark]
