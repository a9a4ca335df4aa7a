"""Starting, serving, draining: how many requests are in flight, and 503 for new ones once the server has to end."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.errors import error_body

# These tell about the server and cost next to nothing: they are answered while it drains.
_ALWAYS = frozenset({"/health", "/metrics", "/live", "/"})


class Lifecycle:
    """Whether requests are accepted, and a way to wait until none is left."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests begun and not ended, streams included."""
        return self._in_flight

    def begin(self) -> None:
        """A request begins."""
        self._in_flight += 1

    def end(self) -> None:
        """A request has ended."""
        self._in_flight -= 1
        self._changed.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests; true when those in flight have ended, false if some are left after `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class CountRequests:
    """ASGI middleware that tells a Lifecycle of each request, and answers 503 while it drains."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        if self._lifecycle.draining:
            message = "the server is shutting down; send the request to another one"
            response = JSONResponse(error_body(503, message), 503, headers={"Retry-After": "5", "Connection": "close"})
            await response(scope, receive, send)
            return
        self._lifecycle.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.end()
