"""A bound on each request's headers: their bytes and number, and how slowly a client may send them.

The body has its own, in body_limit.py. This one is below ASGI, where a request exists only once its headers are there.
"""

import asyncio
import json
from http import HTTPStatus
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmc.runtime.server.errors import error_body

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 256
# After a long iteration of the event loop, its timers run before data from clients is read.
_GRACE_SECONDS = 0.05


def limited_headers(seconds: float) -> type[HttpToolsProtocol]:
    """Return a class of uvicorn's protocol that answers 408 if a request's headers are not complete in time.

    seconds: the time limit. It starts with the connection for the first request, and with the first byte for each later
    one. Between requests, uvicorn's timeout_keep_alive applies.
    """

    class LimitHeaders(_LimitHeaders):
        allowed_seconds = seconds

    return LimitHeaders


class _LimitHeaders(HttpToolsProtocol):
    """Also answers 431 for headers of more than MAX_HEADER_BYTES, and 400 for a request that is cut off.

    The trailers after a chunked body count as headers.
    """

    allowed_seconds: float
    _deadline: asyncio.TimerHandle | None = None
    _in_headers = True
    _in_message = False
    _refused = False
    # Bytes of complete headers.
    _header_bytes = 0
    _headers = 0
    # Bytes that the parser may hold of an incomplete header.
    _held_bytes = 0
    _pieces = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._start_deadline()
        before = self._pieces
        super().data_received(data)
        if (self._in_headers and self._in_message) or self._pieces == before:
            self._held_bytes += len(data)
            self._check_size()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._header_bytes = self._headers = 0
        self._start_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)
        self._check_size()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._pieces += 1
        self._headers += 1
        self._header_bytes += len(name) + len(value) + len(b": \r\n")
        self._check_size()
        if not self._refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        self._in_headers = False
        self._held_bytes = 0
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._held_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pieces += 1
        self._in_headers, self._in_message = True, False
        if not self._refused:
            super().on_message_complete()

    def eof_received(self) -> None:
        """The client sends no more; a half-closed client counts as disconnected."""
        if self._held_bytes or (not self._in_headers and not self.cycle.response_started):
            self._refuse(400, "the request ends in the middle")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_deadline(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.allowed_seconds, self._wait_once_more)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_once_more(self) -> None:
        self._deadline = self.loop.call_later(_GRACE_SECONDS, self._too_late)

    def _too_late(self) -> None:
        self._refuse(408, f"the headers were not whole within {self.allowed_seconds:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with OpenAI's error body and close; if an earlier answer has begun, finish that one instead."""
        self._stop_deadline()
        self._refused = True
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.shutdown()
            return
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _check_size(self) -> None:
        if self._refused:
            return
        if max(self._header_bytes, self._held_bytes) > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        elif self._headers > MAX_HEADERS:
            self._refuse(431, f"there are more than {MAX_HEADERS} headers")

    def _is_answering(self) -> bool:
        """Whether bytes of an answer have been or will be written, to this request or to one before it."""
        if self.pipeline:
            return True
        open_answer = self.cycle is not None and not self.cycle.response_complete
        return open_answer and (self._in_headers or self.cycle.response_started)
