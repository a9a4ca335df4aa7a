"""Shared parts of chat and completion answers: their frame, the chunks of a stream, token counts."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request_output import RequestOutput, Usage
from llmc.runtime.server.outputs import EventStream, answer, outputs_of
from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.served_model import ServedModel

Json = dict[str, Any]
Body = TypeVar("Body", bound=SamplingFields)


class Reply(ABC, Generic[Body]):
    """Takes the engine's outputs and makes chunks of them, or one answer.

    kind, chunk_kind: what OpenAI calls the answer and a chunk. warnings: fields that were ignored, told in the answer
    or the first chunk.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: ServedModel, body: Body, identity: str, warnings: Sequence[str]) -> None:
        self._model = model
        self._body = body
        self._text = model.texts.id_text if body.return_tokens_as_token_ids else model.texts.text
        self._notes: Json = {"warnings": list(warnings)} if warnings else {}
        self._noted: set[str] = set(warnings)
        self._frame: Json = {
            "id": identity,
            "object": self.kind,
            "created": int(time.time()),
            "model": body.model or model.name,
        }

    async def response(self, request: Request, asked: Sequence[GenerationRequest]) -> Response:
        """The reply to a request: a stream of chunks if the client requested one, else the whole answer."""
        if self._body.stream:
            return EventStream(self._chunks(asked))
        return await answer(request, self._answer(asked))

    @abstractmethod
    def take(self, index: int, output: RequestOutput) -> list[list[Json]]:
        """Note an output of the request of that index; returns the choices of each chunk for it."""

    @abstractmethod
    def whole(self) -> Json:
        """The whole answer, after the last output."""

    @abstractmethod
    def counts(self) -> Usage:
        """The token counts until now."""

    def usage(self) -> Json:
        """Token counts, after the last output."""
        return usage_json(self.counts())

    def framed(self, choices: list[Json]) -> Json:
        """An answer of these choices."""
        return {**self._frame, "choices": choices, "usage": self.usage(), **self._notes}

    def _heed(self, output: RequestOutput) -> None:
        """Add a warning for each parameter that the engine has ignored, once."""
        notes = [note for note in dict.fromkeys(output.notes) if note not in self._noted]
        if notes:
            self._noted.update(notes)
            self._notes = {"warnings": [*self._notes.get("warnings", ()), *notes]}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._frame, "object": self.chunk_kind, "choices": choices, **self._notes}
        self._notes = {}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = usage_json(self.counts()) if options.continuous_usage_stats else None
        return chunk

    async def _chunks(self, asked: Sequence[GenerationRequest]) -> AsyncGenerator[Json, None]:
        async with aclosing(outputs_of(self._model, asked)) as outputs:
            async for index, output in outputs:
                self._heed(output)
                for choices in self.take(index, output):
                    yield self._chunk(choices)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._frame, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    async def _answer(self, asked: Sequence[GenerationRequest]) -> Json:
        async with aclosing(outputs_of(self._model, asked)) as outputs:
            async for index, output in outputs:
                self._heed(output)
                self.take(index, output)
        return self.whole()


def usage_json(usage: Usage) -> Json:
    """Token counts as OpenAI gives them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
