"""Starting, serving, draining: how many requests are in flight, and 503 for new ones once the server has to end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.errors import error_body

# These tell about the server and cost next to nothing: they are answered while it drains.
_ALWAYS = frozenset({"/health", "/metrics", "/live", "/"})


# For requests that were cut off to tell their clients.
_CUT_SECONDS = 1.0


class Lifecycle:
    """Whether requests are accepted, and a way to wait until none is left."""

    def __init__(self) -> None:
        self.draining = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request, which the current task serves until the block ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._changed.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests; true when those in flight have ended.

        False if some are left after `seconds`: these are cut off (see EndOrderly), and most have ended by then.
        """
        self.draining = True
        if await self._wait(seconds):
            return True
        for task in self._tasks:
            task.cancel()
        await self._wait(_CUT_SECONDS)
        return False

    async def _wait(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._tasks:
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
        with self._lifecycle.request():
            await self._app(scope, receive, send)
