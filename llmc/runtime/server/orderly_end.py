"""Every answer ends as its client expects, also where a route fails or the server has no time left."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.errors import ApiError, answer_to, stream_end
from llmc.runtime.server.lifecycle import Lifecycle

# For a client that does not read; the server is ending.
_SEND_SECONDS = 0.5


class EndOrderly:
    """ASGI middleware: a failure is a 500, or in a stream the event that its client expects (server/errors.py); a
    request that is cut off while the server drains ends in the same way with 503.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._lifecycle.draining:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEND_SECONDS):
                    await answer.end(_cut_off(), scope, receive)
        except Exception as error:
            await answer.end(answer_to(scope, error), scope, receive)


class _Answer:
    """The sent part of an answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._is_stream = self._complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def end(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send the error, if an answer has not begun or can still end with one."""
        if not self._started:
            await error.response()(scope, receive, self._send)
        elif self._is_stream and not self._complete:
            await self._send({"type": "http.response.body", "body": stream_end(scope, error), "more_body": False})


def _cut_off() -> ApiError:
    message = "the server is shutting down and could not finish this request in time; send it to another one"
    return ApiError(503, message, retry_after=5)
