"""Tokenizes texts for asyncio in separate threads, and counts the pending ones.

The tokenizer lets other threads run meanwhile only if it tokenizes several texts at once, which Tokenizer.encode does
for long ones: half a megabyte takes a quarter of a second.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from llmc.errors import ContextLengthError
from llmc.runtime.server.errors import bad_request
from llmc.runtime.text.tokenizer import Tokenizer

# Fewer and shorter texts are tokenized in less time than it takes to use a thread.
_INLINE_TEXTS, _INLINE_CHARACTERS = 16, 4096
_THREADS = 2
# Maximum total length of texts per unit of work in a thread, so that other work can interleave.
_PIECE_CHARACTERS = 1 << 16

Encode = Callable[[str], list[int]]


class Tokenizing:
    """Tokenizes texts of requests in threads. pending: texts whose requests wait for the engine, and which the engine
    does not know yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, "llmc-tokenizer")
        self.pending = 0

    async def ids(self, text: str, add_special_tokens: bool, most: int, fix: str) -> list[int]:
        """Token ids of a prompt. 400 for text that is not Unicode, ContextLengthError for more tokens than `most`.

        A text with more characters than this number of tokens can have is not tokenized. fix: the advice for a text
        that is too long.
        """
        self.check(text, most, "prompt", fix)
        (ids,) = await self.of_all([text], partial(self._tokenizer.encode, add_special_tokens=add_special_tokens))
        if len(ids) > most:
            raise too_long(f"{len(ids)} tokens", most, "prompt", fix)
        return ids

    async def of_all(self, texts: Sequence[str], encode: Encode) -> list[list[int]]:
        """Token ids of each text, in order. They were checked."""
        if len(texts) <= _INLINE_TEXTS and sum(map(len, texts)) < _INLINE_CHARACTERS:
            return [encode(text) for text in texts]
        loop, ids = asyncio.get_running_loop(), list[list[int]]()
        with self._counted(len(texts)):
            for piece in _pieces(texts):
                ids += await loop.run_in_executor(self._threads, _encoded, encode, piece)
        return ids

    def check(self, text: str, most: int, param: str, fix: str) -> None:
        """400 for text that has no UTF-8 form, ContextLengthError for one that certainly has more tokens than that."""
        check_text(text, param)
        least = -(-len(text) // self.longest_token)
        if least > most:
            raise too_long(f"at least {least} tokens ({len(text)} characters)", most, param, fix)

    @property
    def longest_token(self) -> int:
        """The most characters that a token stands for."""
        return max(1, self._tokenizer.longest_token)

    def close(self) -> None:
        """Stop tokenizing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _counted(self, texts: int) -> Iterator[None]:
        self.pending += texts
        try:
            yield
        finally:
            self.pending -= texts


def too_long(count: str, most: int, param: str, fix: str) -> ContextLengthError:
    """The error for a text with too many tokens.

    count: the text's length in words, such as `9000 tokens`. most: the limit. param: the field of the request.
    """
    return ContextLengthError(
        f"the {'prompt' if param == 'prompt' else 'text'} has {count}, and this engine reads at most {most}",
        at=param,
        fix=fix,
    )


def check_text(text: str, param: str) -> None:
    """400 for text that has no UTF-8 form (JSON can spell half of a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request("the text has half of a surrogate pair, which is not a character", param) from None


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in order, some at a time."""
    piece, length = list[str](), 0
    for text in texts:
        piece.append(text)
        length += len(text)
        if length >= _PIECE_CHARACTERS:
            yield piece
            piece, length = [], 0
    if piece:
        yield piece


def _encoded(encode: Encode, texts: Sequence[str]) -> list[list[int]]:
    return [encode(text) for text in texts]
