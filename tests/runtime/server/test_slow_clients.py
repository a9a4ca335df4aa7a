"""Clients that send nothing, too slowly, or only a part: an answer or an orderly end soon, and others are served."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from urllib.parse import urlparse

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from llmc.runtime.server.header_limit import limited_headers
from tests.runtime.server.conftest import LiveServer

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(server: LiveServer) -> Iterator[socket.socket]:
    address = urlparse(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=300) as raw:
        yield raw


def all_of(raw: socket.socket) -> bytes:
    """What comes until the server closes."""
    said = bytearray()
    while part := raw.recv(1 << 16):
        said += part
    return bytes(said)


def one_answer(raw: socket.socket) -> None:
    """Ask for /health and read the answer, so that the connection is one that was used."""
    raw.sendall(GET)
    said = b""
    while not said.endswith(b"}"):
        said += raw.recv(1 << 16)
    assert said.startswith(b"HTTP/1.1 200")


def drip(raw: socket.socket, sent: bytes) -> None:
    """One byte after the other, each of them soon after the last, until the server has had enough."""
    for byte in sent:
        if select.select([raw], [], [], 0.1)[0]:
            return
        raw.sendall(bytes([byte]))


def sends_nothing(raw: socket.socket) -> None:
    pass


def sends_half_a_line(raw: socket.socket) -> None:
    raw.sendall(b"GET /heal")


def drips_headers(raw: socket.socket) -> None:
    drip(raw, POST)


def drips_line_ends_between_requests(raw: socket.socket) -> None:
    one_answer(raw)
    drip(raw, b"\r\n" * 2000)


def stops_in_the_body(raw: socket.socket) -> None:
    raw.sendall(POST + b"Content-Length: 100\r\n\r\n{")


def stops_in_a_second_request(raw: socket.socket) -> None:
    one_answer(raw)
    raw.sendall(GET[:9])


SLOW: tuple[Callable[[socket.socket], None], ...] = (
    sends_nothing,
    sends_half_a_line,
    drips_headers,
    drips_line_ends_between_requests,
    stops_in_the_body,
    stops_in_a_second_request,
)


def test_slow_clients_get_408(server: LiveServer, client: httpx.Client) -> None:
    answers: dict[str, bytes] = {}

    def ask(send: Callable[[socket.socket], None]) -> None:
        with connected(server) as raw:
            send(raw)
            answers[send.__name__] = all_of(raw)

    asking = [Thread(target=ask, args=(send,)) for send in SLOW]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert set(answers) == {send.__name__ for send in SLOW}
    for name, said in answers.items():
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower(), (name, said)
        assert json.loads(body)["error"]["type"] == "timeout_error"
    assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /heal",
        POST,
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["nothing", "line", "headers", "body", "chunk"],
)
def test_half_closed_clients(sent: bytes, server: LiveServer, client: httpx.Client) -> None:
    with connected(server) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        said = all_of(raw)
    assert said.startswith(b"HTTP/1.1 400") if sent else said == b""
    assert client.get("/health").status_code == 200


def test_endless_headers(server: LiveServer, client: httpx.Client) -> None:
    # What was still on its way when the server closed resets the connection.
    with suppress(OSError), connected(server) as raw:
        raw.sendall(GET[:-2] + b"x: " + b"y" * (1 << 20))
        assert raw.recv(1 << 10).startswith(b"HTTP/1.1 431")
    assert client.get("/health", headers={"x": "y" * 40_000}).status_code == 200


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "sent, part",
    [
        (GET[:-2] + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(80)) + b"\r\n", b"65536 bytes"),
        (b"GET /health?" + b"y" * 70_000 + GET[11:], b"65536 bytes"),
        (GET[:-2] + b"x:\r\n" * 300 + b"\r\n", b"256 headers"),
        (CHUNKED + b"x: y\r\n" * 300, b"256 headers"),
        (CHUNKED + b"x: " + b"y" * 400_000, b"65536 bytes"),
    ],
    ids=["finished", "path", "many", "many trailers", "endless trailer"],
)
def test_headers_that_are_whole_count_too(sent: bytes, part: bytes, server: LiveServer, client: httpx.Client) -> None:
    """A request that ends properly is refused as well, and is not served behind its refusal."""
    with connected(server) as raw:
        said = b""
        with suppress(OSError):
            raw.sendall(sent)
            said = raw.recv(1 << 16)
    assert said.startswith(b"HTTP/1.1 431") and part in said and said.count(b"HTTP/1.1") == 1
    assert client.get("/health", headers={"x": "y" * 60_000}).status_code == 200


def test_an_idle_client_that_leaves_is_told_nothing(server: LiveServer) -> None:
    with connected(server) as raw:
        one_answer(raw)
        raw.shutdown(socket.SHUT_WR)
        assert all_of(raw) == b""


def test_an_answer_is_not_cut_off_by_half_a_request_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the event loop is put forward while the answer is half sent: every limit has passed then."""

    async def slow_answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        for _ in range(4):
            ahead.append(3600.0)
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"ended"})

    async def said_to(sent: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + sum(ahead))
        config = uvicorn.Config(slow_answer, http=limited_headers(600), lifespan="off", log_level="warning")
        config.load()
        protocol = partial(limited_headers(600), config, ServerState(), {})
        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        async with listening:
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(sent)
            said = await reader.read()
            writer.close()
        return said

    ahead: list[float] = []
    for second in (GET[:9], b"no HTTP\r\n\r\n"):
        said = asyncio.run(said_to(GET + second))
        assert said.count(b"HTTP/1.1") == 1 and b"begun" in said and said.endswith(b"ended\r\n0\r\n\r\n"), said
