"""Names the server answers to, proxies it believes, what needs no key, and Unix sockets that were left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from llmc.runtime.server.header_limit import limited_headers
from llmc.runtime.server.host_check import hosts_of
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.serve import uvicorn_config
from tests.cli.command import assert_user_error, llmc
from tests.runtime.server.conftest import LiveServer, eventually, serving


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "[::2]:80"])
def test_a_name_of_somebody_else_is_refused(host: str, server: LiveServer, client: httpx.Client) -> None:
    """As a page would send it whose name has been made to mean 127.0.0.1."""
    for path in ("/v1/models", "/metrics", "/live", "/", "/health"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403 and "--allowed-host" in answer.json()["error"]["message"], path
    answer = client.post("/v1/completions", json={"prompt": "hi"}, headers={"Host": host})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
def test_names_of_this_machine_are_answered(host: str, client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_request_names_one_host(server: LiveServer) -> None:
    port = int(server.url.rpartition(":")[2])
    for head in (b"", b"Host: localhost\r\nHost: localhost\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=300) as raw:
            raw.sendall(b"GET /v1/models HTTP/1.1\r\n" + head + b"\r\n")
            assert raw.recv(1 << 10).startswith(b"HTTP/1.1 403")


def test_which_servers_check_the_host(tmp_path: Path) -> None:
    assert hosts_of(ServeOptions(engine=tmp_path, api_keys=("k",))) is None
    assert hosts_of(ServeOptions(engine=tmp_path, host="0.0.0.0")) is None
    assert hosts_of(ServeOptions(engine=tmp_path, uds=tmp_path / "s")) is None
    assert "127.0.0.5" in (hosts_of(ServeOptions(engine=tmp_path, host="127.0.0.5")) or ())
    given = hosts_of(ServeOptions(engine=tmp_path, host="0.0.0.0", allowed_hosts=("llm.example",)))
    assert given is not None and "llm.example" in given


def test_allowed_hosts_and_open_metrics(engine_directory: Path) -> None:
    flags = ("--api-key", "k", "--metrics-without-key", "--allowed-host", "llm.example")
    with serving(engine_directory, *flags) as live, live.client() as nobody:
        assert nobody.get("/metrics").status_code == 200
        for path in ("/", "/live", "/docs", "/redoc", "/openapi.json", "/v1/models", "/metrics/"):
            assert nobody.get(path).status_code == 401, path
        assert nobody.get("/metrics", headers={"Host": "evil.example"}).status_code == 403
        assert nobody.get("/metrics", headers={"Host": "llm.example"}).status_code == 200


def test_a_forged_address_counts_only_from_a_proxy_that_is_believed(engine_directory: Path, tmp_path: Path) -> None:
    """What the application is told of its client is what stands in the log."""

    async def who(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    async def told(options: ServeOptions) -> str:
        config = uvicorn_config(who, options)
        config.load()
        protocol = partial(limited_headers(1), config, ServerState(), {})
        listening = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        async with listening, httpx.AsyncClient() as client:
            port = listening.sockets[0].getsockname()[1]
            answer = await client.get(f"http://127.0.0.1:{port}/", headers={"X-Forwarded-For": "203.0.113.9"})
        return answer.text

    options = ServeOptions(engine=tmp_path)
    assert asyncio.run(told(options)) == "127.0.0.1"
    others = replace(options, proxy_headers=True, forwarded_allow_ips="198.51.100.0/24, 192.0.2.1")
    assert asyncio.run(told(others)) == "127.0.0.1"
    assert asyncio.run(told(replace(options, proxy_headers=True))) == "203.0.113.9"
    answer = llmc("serve", engine_directory, "--forwarded-allow-ips", "proxy.example")
    assert_user_error(answer, "--forwarded-allow-ips", "proxy.example")


def test_a_socket_that_was_left_behind_is_replaced(engine_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "llmc.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    command = [sys.executable, "-m", "llmc", "serve", str(engine_directory), "--uds", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _listens(path))
        # The engine may still be loading: the socket is not to be taken for one that was left behind.
        refused = llmc("serve", engine_directory, "--uds", str(path))
        assert_user_error(refused, "another server listens", str(path))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://llmc", timeout=300) as client:
            assert client.get("/v1/models").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert not path.exists(), "it is gone with its server"
    path.write_text("a file")
    assert_user_error(llmc("serve", engine_directory, "--uds", str(path)), "no socket", str(path))
    assert path.read_text() == "a file"


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
