"""Fields that no model knows: an error, or (`--unknown-fields warn`) left out with a warning in the answer."""

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from llmc.runtime.server.schemas.field_notes import REFUSED, is_given

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class WarningRoute(APIRoute):
    """A route that reads a body with unknown fields without them, and notes their names for `ignored_of`.

    Unknown fields that would change the answer are still an error.
    """

    def get_route_handler(self) -> Handler:
        original = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await original(request)
            except RequestValidationError as error:
                body, names = without_unknown(error.body, error.errors())
                if not names:
                    raise
                return await original(_WithBody(request, body, names))

        return handle


def ignored_of(request: Request) -> list[str]:
    """A sentence for each unknown field that was left out of this request."""
    names: Sequence[str] = getattr(request.state, "unknown_fields", ())
    return [f"unknown field {name} is ignored" for name in names]


def without_unknown(body: Any, errors: Sequence[Any]) -> tuple[Any, list[str]]:
    """The body without the fields that pydantic's errors call unknown, in place, and their names.

    No names if there are none to leave out.
    """
    names: list[str] = []
    for error in errors:
        place = [part for part in error["loc"] if part != "body"]
        if error["type"] == "extra_forbidden" and not (place[0] in REFUSED and is_given(error["input"])):
            name = _take_out(body, place)
            names += [] if name is None or name in names else [name]
    return body, names


def _take_out(body: Any, place: Sequence[Any]) -> str | None:
    """Delete the value at a place, which may also name alternatives of unions, which are not keys. Returns its name if
    it existed."""
    *above, key = place
    path: list[str] = []
    for part in above:
        if _has(body, part):
            body = body[part]
            path.append(str(part))
    if not isinstance(body, dict) or key not in body:
        return None
    del body[key]
    return ".".join([*path, str(key)])


def _has(body: Any, part: Any) -> bool:
    if isinstance(body, dict):
        return part in body
    return isinstance(body, list) and isinstance(part, int) and part < len(body)


class _WithBody(Request):
    """The same request with another body."""

    def __init__(self, request: Request, body: Any, unknown_fields: Sequence[str]) -> None:
        super().__init__(request.scope, request.receive)
        self._body = json.dumps(body).encode()
        self.state.unknown_fields = list(unknown_fields)
