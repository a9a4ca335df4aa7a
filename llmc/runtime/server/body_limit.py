"""A bound on each request's body: its bytes, and how slowly a client may send it."""

import asyncio
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.errors import error_body

# Slower than any line on which tokens could be streamed back.
LEAST_BYTES_PER_SECOND = 64 << 10


class LimitBody:
    """ASGI middleware: 413 for a body of more than max_bytes, 408 for one that comes too slowly.

    A body has `seconds`, plus the time that its bytes take at LEAST_BYTES_PER_SECOND.

    The body is read here, before any route starts, so that a slow client holds only its connection.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        try:
            if not announced.isdigit() or int(announced) > self._max_bytes:
                raise _TooLarge
            body = await self._read(receive)
        except _TooLarge:
            message = f"the body has more than {self._max_bytes} bytes"
            await _refuse(413, message, scope, receive, send)
        except TimeoutError:
            message = f"the body stopped for {self._seconds:g} seconds or came too slowly"
            await _refuse(408, message, scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        start = time.monotonic()
        while more:
            allowed = start + self._seconds + len(body) / LEAST_BYTES_PER_SECOND - time.monotonic()
            message = await asyncio.wait_for(receive(), max(0.0, allowed))
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise _TooLarge
            more = message.get("more_body", False)
        return bytes(body)


class _TooLarge(Exception):
    """The body has too many bytes."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` as if the body had not been read; what follows it, such as a disconnect, comes from the original."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    response = JSONResponse(error_body(status, message), status, headers={"Connection": "close"})
    await response(scope, receive, send)
