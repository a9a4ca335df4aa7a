"""One sequence in the shared loop, read piece by piece while it grows."""

from collections.abc import Generator

from llmc.runtime.loop.shared_loop import SharedLoop
from llmc.runtime.requests.boundary import as_llmc_error
from llmc.runtime.requests.completion import Piece
from llmc.runtime.requests.generation import Generation
from llmc.runtime.text.output_text import OutputText


def pieces(
    loop: SharedLoop, request: Generation, new_text: OutputText, *, has_text: bool
) -> Generator[Piece, None, None]:
    """Pieces of whole characters, or of tokens if there is no text. Stopping early frees the request.

    new_text: an empty output, for a request that does not write its own.
    """
    news = _News(request)
    ids: tuple[int, ...] = ()
    total, is_last = 0, False
    with as_llmc_error(), loop.serving((request,)) as until:
        while not is_last:
            until(news.has_come)
            if request.error is not None:
                raise request.error
            tokens, text, is_last = news.take()
            ids, total = ids + tokens, total + len(tokens)
            if request.text is None:
                for token in tokens:
                    new_text.add(token)
                if is_last:
                    new_text.finish()
                text = new_text.read()
            if text or is_last or not has_text:
                yield Piece(text, ids, total, request.finish_reason if is_last else None)
                ids = ()


class _News:
    """The new tokens of a request. Gathered between steps, because any thread may run steps."""

    def __init__(self, request: Generation) -> None:
        self._request = request
        self._seen = request.prompt_tokens
        self._ids: tuple[int, ...] = ()
        self._text = ""
        self._is_last = False

    def has_come(self) -> bool:
        """Whether there is something to take."""
        request = self._request
        if request.finished or len(request.tokens) > self._seen:
            self._ids += tuple(request.tokens[self._seen :])
            self._seen = len(request.tokens)
            self._is_last = request.finished
            if request.text is not None:
                self._text += request.text.read()
        return self._is_last or bool(self._ids)

    def take(self) -> tuple[tuple[int, ...], str, bool]:
        """Tokens, their text if the request writes it, and whether that is all. Not while `has_come` may be called."""
        ids, text, self._ids, self._text = self._ids, self._text, (), ""
        return ids, text, self._is_last
