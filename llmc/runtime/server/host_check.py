"""The host names that a server accepts, so that a web page cannot reach it under a name that its attacker controls.

A name that an attacker owns can be made to mean 127.0.0.1 (DNS rebinding): a page under that name then has the same
origin as a server here, which may need no key. The browser does not let the page change the Host header.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server.errors import error_body
from llmc.runtime.server.options import ServeOptions

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class CheckHost:
    """ASGI middleware: 403 for a request whose Host header is not one of `hosts`, which are names without a port."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(map(_normal, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = Headers(scope=scope).getlist("host")
            if len(names) != 1 or host_name(names[0]) not in self._hosts:
                await _refusal(names)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def hosts_of(options: ServeOptions) -> tuple[str, ...] | None:
    """The names to answer to; None for any.

    Any, unless some were given or only the loopback address keeps others out: a page has no key, and cannot reach a
    Unix socket.
    """
    is_guarded = not options.api_keys and options.uds is None and is_loopback(options.host)
    if not is_guarded and not options.allowed_hosts:
        return None
    return (*LOOPBACK_NAMES, options.host, *options.allowed_hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """The name in a Host header: without its port, and of an IPv6 address without its brackets."""
    if header.startswith("["):
        return _normal(header[1:].partition("]")[0])
    return _normal(header.partition(":")[0])


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")


def _refusal(given: Sequence[str]) -> JSONResponse:
    seen = f"names {given[0]!r:.100}" if len(given) == 1 else f"is there {len(given)} times"
    message = f"the Host header {seen}: this server answers to other names; allow one with --allowed-host NAME"
    return JSONResponse(error_body(403, message), 403, headers={"Connection": "close"})
