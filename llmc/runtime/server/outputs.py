"""The engine's outputs for one HTTP request: those of several prompts as they come, and only while the client is
connected."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from llmc.errors import LlmcError
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request_output import RequestOutput
from llmc.runtime.server.connection import ClientLeft, while_connected
from llmc.runtime.server.errors import ApiError, answer_to, stream_end
from llmc.runtime.server.served_model import ServedModel

Event = dict[str, Any]
# nginx's status for a client that disconnected; it only appears in the log.
CLIENT_LEFT = 499


async def outputs_of(
    model: ServedModel, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the request, output) as they come. Leaving the iteration aborts what is not finished."""
    if len(requests) == 1:
        async with aclosing(_measured(model, requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue()

    async def forward(index: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(_measured(model, request)) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
        finally:
            queue.put_nowait((index, None))

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            tasks.append(asyncio.create_task(forward(index, request)))
            # Each prompt's blocks are hashed in its task: hundreds in a row would hold up all other requests.
            await asyncio.sleep(0)
        left = len(tasks)
        while left:
            of, news = await queue.get()
            if news is None:
                left -= 1
                await tasks[of]
            else:
                yield of, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _measured(model: ServedModel, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one request, recorded in the metrics."""
    loop, before = asyncio.get_running_loop(), None
    async with aclosing(model.engine.generate(request)) as stream:
        async for output in stream:
            now = loop.time()
            if before is not None:
                model.metrics.gap(now - before)
            before = now
            if output.finished:
                model.metrics.finished(output, request.params.n)
            yield output


async def answer(request: Request, work: Coroutine[Any, Any, Event]) -> Response:
    """The JSON that `work` makes, unless the client leaves before."""
    try:
        return JSONResponse(await while_connected(request.receive, work))
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)


class EventStream(Response):
    """Server-sent events of JSON objects, closed with [DONE]; the source is closed as soon as the client leaves.

    The first event is awaited before anything is sent, so that a refused request still gets its status.
    """

    ending = b"data: [DONE]\n\n"

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    def encode(self, event: Event) -> bytes:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return b"data: " + data + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._produce(scope, receive, send))
        except ClientLeft:
            return
        finally:
            await self._events.aclose()

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except (ApiError, LlmcError) as error:
            await answer_to(scope, error).response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_body(self.encode(first)))
        try:
            async for event in self._events:
                await send(_body(self.encode(event)))
        except (ApiError, LlmcError) as error:
            await send(_body(stream_end(scope, answer_to(scope, error)), more=False))
        else:
            await send(_body(self.ending, more=False))


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
