"""Starting, serving, draining: how many requests are in flight, and 503 for new ones once the server has to end."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.errors import error_body

# These tell about the server and cost next to nothing: they are answered while it drains.
_ALWAYS = frozenset({"/health", "/metrics", "/live", "/"})


# For requests that were cut off to tell their clients.
_CUT_SECONDS = 1.0
# A header for requests that were refused before any work: another server may serve them.
NOT_BEGUN_HEADER = "x-llmc-not-begun"


class Lifecycle:
    """Whether requests are accepted, and a way to wait until none is left. is_open: whether the engine takes any."""

    def __init__(self, is_open: Callable[[], bool] = lambda: True) -> None:
        self.draining = False
        self._is_open = is_open
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

    @property
    def refusal(self) -> str | None:
        """Return why requests are refused; None if they are not."""
        if self.draining:
            return "the server is shutting down; send the request to another one"
        return None if self._is_open() else "the engine is not open now; try again later, or send the request elsewhere"

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
    """ASGI middleware that tells a Lifecycle of each request, and answers 503 while it accepts none."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        refusal = self._lifecycle.refusal
        if refusal is not None:
            headers = {"Retry-After": "5", "Connection": "close", NOT_BEGUN_HEADER: "1"}
            await JSONResponse(error_body(503, refusal), 503, headers=headers)(scope, receive, send)
            return
        with self._lifecycle.request():
            await self._app(scope, receive, send)
