"""Errors in OpenAI's shape: {"error": {message, type, param, code}} with the status that its clients expect."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from llmc.errors import (
    AdapterError,
    ContextLengthError,
    LlmcError,
    ModelFailureError,
    RequestError,
    RequestFaultError,
    UnavailableError,
    words_of,
)
from llmc.runtime.server.request_id import request_id
from llmc.runtime.server.schemas.field_notes import REFUSED
from llmc.runtime.server.schemas.text_parts import TEXT_ONLY

_log = logging.getLogger("llmc.server")
_STREAM_END = "llmc.stream_end"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer with an error status. param: the field that is wrong, if one is. retry_after: seconds."""

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    retry_after: int | None = field(default=None, kw_only=True)

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else None
        body = error_body(self.status, self.message, self.param, self.code)
        return JSONResponse(body, self.status, headers=headers)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param)


def of_llmc_error(error: LlmcError) -> ApiError:
    """A request that the engine refuses is the client's fault; anything else is the server's."""
    message = f"{error.problem}; {error.fix}" if error.fix else error.problem
    if isinstance(error, UnavailableError):
        return ApiError(503, message, retry_after=1)
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, param=_field(error), code="context_length_exceeded")
    if isinstance(error, RequestFaultError):
        return ApiError(500, "serving the request has failed; the server's log says why")
    if isinstance(error, RequestError) and not isinstance(error, ModelFailureError):
        return ApiError(400, message, param=_field(error))
    return ApiError(400 if isinstance(error, AdapterError) else 500, message)


def _field(error: LlmcError) -> str | None:
    """The field of the request that is wrong. An error is at `NAME`, or at `NAME=VALUE`."""
    return None if error.at is None else error.at.partition("=")[0]


def answer_to(scope: Scope, error: Exception) -> ApiError:
    """The answer to an exception; what was not foreseen is a 500 without its traceback.

    Every 500 is logged with the request's id, which is also in the answer.
    """
    traceback: BaseException | None = None
    if isinstance(error, ApiError):
        answer = error
    elif isinstance(error, LlmcError):
        answer, traceback = of_llmc_error(error), error.__cause__
    else:
        answer, traceback = ApiError(500, "the server failed; its log says why"), error
    if answer.status != 500:
        return answer
    identity = request_id(scope)
    request_line = f"{scope['method']} {scope['path']!r:.200}"
    reason = words_of(error, 1000)
    if not isinstance(error, LlmcError):
        reason = f"{type(error).__name__}: {reason}"
    _log.error("request %s, %s: 500: %s", identity, request_line, reason, exc_info=traceback)
    return ApiError(500, f"{answer.message} (request {identity})", param=answer.param, code=answer.code)


def error_events(error: ApiError) -> bytes:
    """Return the end of a stream that fails: an event with the error, and the event that ends every stream."""
    return b"data: " + bytes(error.response().body) + b"\n\ndata: [DONE]\n\n"


def typed_error_event(error: ApiError, sequence_number: int) -> bytes:
    """Return the last event of a failed stream of typed events: OpenAI's `error` event."""
    body = error_body(error.status, error.message, error.param, error.code)["error"]
    event = {"type": "error", **{name: body[name] for name in ("code", "message", "param")}}
    return f"event: error\ndata: {json.dumps({**event, 'sequence_number': sequence_number})}\n\n".encode()


def end_stream_with(scope: Scope, end: Callable[[ApiError], bytes]) -> None:
    """Set the end of a stream that fails; by default it is that of error_events."""
    scope[_STREAM_END] = end


def stream_end(scope: Scope, error: ApiError) -> bytes:
    """The last bytes of the stream that answers a request, which cannot go on."""
    end: Callable[[ApiError], bytes] = scope.get(_STREAM_END, error_events)
    return end(error)


def add_error_handlers(app: FastAPI) -> None:
    """Give every error that the routes foresee OpenAI's shape; EndOrderly sees to the others."""

    async def foreseen(request: Request, error: Exception) -> JSONResponse:
        return answer_to(request.scope, error).response()

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = described(error.errors())
        return bad_request(message, param).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_body(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(body, error.status_code, headers=error.headers)

    app.add_exception_handler(ApiError, foreseen)
    app.add_exception_handler(LlmcError, foreseen)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


def described(errors: Any) -> tuple[str, str | None]:
    """Return pydantic's errors on one line, and the first field that has one."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    if first["loc"] == ("body",):
        return "the body is not a JSON object; send one with the header Content-Type: application/json", None
    place = [str(part) for part in first["loc"] if part != "body"]
    of_field = [e for e in errors if [str(p) for p in e["loc"] if p != "body"][:1] == place[:1]]
    field = place[0] if place else None
    if field is None:
        return first["msg"], None
    plain = next((e for e in of_field if e["type"] == TEXT_ONLY), None)
    if plain is not None:
        return plain["msg"], field
    if first["type"] == "extra_forbidden":
        if len(place) == 1 and field in REFUSED:
            return f"{field} is not supported: {REFUSED[field]}", field
        return f"unknown field {'.'.join(place)}", ".".join(place)
    if len(of_field) > 1 and len({tuple(e["loc"][:2]) for e in of_field}) == 1:
        reasons = list(dict.fromkeys(e["msg"] for e in of_field))
        return f"{field} cannot be {first['input']!r:.80}: {'; or: '.join(reasons[:5])}", field
    return f"{'.'.join(place)} cannot be {first.get('input')!r:.80}: {first['msg']}", field
