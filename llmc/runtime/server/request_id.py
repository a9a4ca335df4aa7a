"""A name for every HTTP request, in the header of its answer and in the log of its failure."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = "llmc.request_id"


class NameRequests:
    """ASGI middleware: gives each request an id. behind_router: takes the one that the router has given it."""

    def __init__(self, app: ASGIApp, behind_router: bool = False) -> None:
        self._app = app
        self._behind_router = behind_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        router_id = Headers(scope=scope).get(REQUEST_ID_HEADER) if self._behind_router else None
        identity = scope[_REQUEST_ID] = router_id or f"req-{uuid.uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = identity
            await send(message)

        await self._app(scope, receive, named)


def request_id(scope: Scope) -> str:
    """The request's name."""
    return str(scope.get(_REQUEST_ID, "without a name"))
