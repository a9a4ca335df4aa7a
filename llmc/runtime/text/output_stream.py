"""Turn the loop's raw news of a request into outputs with text: runs in the client's event loop, concurrently with the
next step."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmc.errors import RequestError
from llmc.runtime.requests.request_output import (
    ChoiceDelta,
    ChoiceResult,
    FinishReason,
    RequestOutput,
    RequestTimes,
    Row,
    TokenLogprobs,
    Usage,
)
from llmc.runtime.text.output_text import Decode, OutputText


class ChoiceNews(NamedTuple):
    """Tokens that a choice has gained. number: the choice's. text: what they add, if the loop has decoded them."""

    number: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cumulative_logprob: float | None
    row: Row | None = None


class News(NamedTuple):
    """The result of a step for one request, or its error."""

    choices: tuple[ChoiceNews, ...]
    cached_tokens: int
    times: RequestTimes
    finished: bool
    error: RequestError | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class OutputStream:
    """The client's end of a request. Its news come in the event loop that it was made in, by `put`.

    new_text: creates an empty text of the request; decode: returns the text of all tokens of a choice. notes: for the
    first output. Unread news are joined, so that a slow client gets fewer and longer outputs.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        new_text: Callable[[], OutputText],
        decode: Decode,
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self.event_loop = asyncio.get_running_loop()
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._new_text = new_text
        self._decode = decode
        self._texts: dict[int, OutputText] = {}
        self._news: list[News] = []
        self._completion_tokens = 0
        self._arrival = asyncio.Event()

    def put(self, news: News) -> None:
        """Wake the reader. Only in the event loop."""
        self._news.append(news)
        self._arrival.set()

    async def read(self) -> RequestOutput:
        """The next output. Raises the request's error."""
        while not self._news:
            self._arrival.clear()
            await self._arrival.wait()
        news, self._news = self._news, []
        return self.output(news)

    def output(self, news: Sequence[News]) -> RequestOutput:
        """Return several news as one output."""
        last = news[-1]
        if last.error is not None:
            raise last.error
        by_index: dict[int, list[ChoiceNews]] = {}
        for part in news:
            for choice in part.choices:
                by_index.setdefault(choice.number, []).append(choice)
        choices = tuple(self._delta(index, by_index[index]) for index in sorted(by_index))
        self._completion_tokens += sum(len(choice.token_ids) for choice in choices)
        notes, self.notes = self.notes, ()
        return RequestOutput(
            self._request_id,
            choices,
            Usage(self._prompt_tokens, last.cached_tokens, self._completion_tokens),
            last.finished,
            last.times,
            next((piece.prompt_logprobs for piece in news if piece.prompt_logprobs is not None), None),
            notes,
        )

    def _delta(self, index: int, news: Sequence[ChoiceNews]) -> ChoiceDelta:
        last = news[-1]
        logprobs = None if last.logprobs is None else tuple(p for part in news for p in part.logprobs or ())
        tokens = tuple(token for part in news for token in part.token_ids)
        text = "".join(self._decoded(part) for part in news)
        ended = last.finish_reason, last.stop_reason, last.cumulative_logprob
        return ChoiceDelta(index, text, tokens, logprobs, *ended, last.row)

    def _decoded(self, news: ChoiceNews) -> str:
        if news.text is not None:
            return news.text
        text = self._texts.get(news.number)
        if text is None:
            if news.finish_reason is not None:
                return self._decode(news.token_ids)
            text = self._texts[news.number] = self._new_text()
        for token in news.token_ids:
            text.add(token)
        if news.finish_reason is not None:
            text.finish()
        return text.read()


def news_of_results(
    results: Sequence[ChoiceResult],
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    cached_tokens: int,
    times: RequestTimes,
) -> News:
    """Everything at once, for answers that cannot be streamed."""
    choices = tuple(
        ChoiceNews(i, r.token_ids, r.text, r.logprobs, r.finish_reason, r.stop_reason, r.cumulative_logprob, r.row)
        for i, r in enumerate(results)
    )
    return News(choices, cached_tokens, times, True, prompt_logprobs=prompt_logprobs)
