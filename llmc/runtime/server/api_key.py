"""API keys on every route but /health, compared in time that does not depend on where they differ."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.errors import error_body

OPEN_PATHS = frozenset({"/health"})
# On these paths a browser prompts its user for the key and sends it as a password.
PAGE_PATHS = frozenset({"/", "/docs", "/live"})
HOLDER_HEADER = "x-llmc-key-holder"
_HOLDER = "llmc.key_holder"


class RequireApiKey:
    """ASGI middleware: 401 without one of the keys, as a bearer token or as the password of basic authentication.

    open_paths: those that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = [_digest(key.encode()) for key in keys]
        self._separate = len(set(keys)) > 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization", "")
        if self._allows(authorization):
            if self._separate:
                scope[_HOLDER] = hashlib.sha256(presented_key(authorization)).hexdigest()[:16]
            await self._app(scope, receive, send)
            return
        await refusal(scope["path"])(scope, receive, send)

    def _allows(self, authorization: str) -> bool:
        # Digests, since comparing keys would tell by its time how long they are; and all of them, since stopping at the
        # matching key would reveal its position.
        digest = _digest(presented_key(authorization))
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0


class TrustRouter:
    """ASGI middleware of a replica: the tenant of a request is in the header that llmc's router adds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (holder := Headers(scope=scope).get(HOLDER_HEADER)) is not None:
            scope[_HOLDER] = holder
        await self._app(scope, receive, send)


def holder_of(request: Request) -> str | None:
    """A name for the key that the request came with; None if there is one key or none."""
    holder: str | None = request.scope.get(_HOLDER)
    return holder


def tenant_of(request: Request, salt: str | None) -> str | None:
    """The tenant, within which cached prefixes are shared: requests of one key with one salt. None if there is one key
    and no salt."""
    holder = holder_of(request)
    return None if holder is None and salt is None else f"{holder or ''}:{salt or ''}"


def presented_key(authorization: str) -> bytes:
    """The key in an Authorization header; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")  # Headers are bytes that were read as Latin-1.
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def refusal(path: str) -> Response:
    """A 401 response; on the page's paths, one that makes a browser prompt for the key."""
    if path in PAGE_PATHS:
        headers = {"WWW-Authenticate": 'Basic realm="llmc: any name, and the API key as password", charset="UTF-8"'}
        return PlainTextResponse("an API key is needed: any user name, the key as password\n", 401, headers)
    message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
    return JSONResponse(error_body(401, message, code="invalid_api_key"), 401, headers={"WWW-Authenticate": "Bearer"})
