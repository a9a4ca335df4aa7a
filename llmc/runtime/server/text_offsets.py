"""The offsets of tokens in their text: OpenAI's `text_offset`, in characters of that text."""

from collections.abc import Sequence
from functools import partial

from llmc.runtime.text.output_text import INCOMPLETE, OutputText
from llmc.runtime.text.tokenizer import Tokenizer


class OutputOffsets:
    """Text offsets of an output's tokens as its text grows. A token that is a part of a character begins at the
    character; a special token that the text omits begins at the next token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._text = OutputText(partial(tokenizer.decode, skip_special_tokens=skip_special_tokens), ())

    @property
    def end(self) -> int:
        """The current length of the text."""
        return len(self._text.text())

    def next(self, token: int) -> int:
        """The offset of the output's next token in its text."""
        begin, pending = len(self._text.text()), self._text.pending
        self._text.add(token)
        # Bytes before the token that have not become a character after all.
        added = self._text.text()[begin : begin + pending]
        return begin + len(added) - len(added.lstrip(INCOMPLETE))


def prompt_offsets(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[int]:
    """The offsets of a prompt's tokens in its text, which may lack the special tokens around them."""
    offsets, starts = OutputOffsets(tokenizer, skip_special_tokens=False), list[int]()
    for token in ids:
        content, end = tokenizer.special_tokens.get(token), offsets.end
        starts.append(offsets.next(token) if content is None or text.startswith(content, end) else end)
    return [min(offset, len(text)) for offset in starts]
