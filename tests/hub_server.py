"""A Hugging Face hub on this machine: what its client asks of the real one, over HTTP, and hubs that answer wrongly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

COMMIT = "a" * 40
HOSTILE = "hostile"


@dataclass
class Answer:
    """about: what was asked. method, url: how. body: what is sent; endless repeats it for good, without a length."""

    about: Literal["revision", "listing", "file", "other"]
    method: str
    url: str
    body: bytes
    headers: dict[str, str]
    status: int = 200
    endless: bool = False


# Makes an answer another one, in place.
Fault = Callable[[Answer], None]


@dataclass
class Hub:
    """directory: the model's files. faults: by the name of a model of `hostile/`, which has the same files. asked: the
    files that were fetched."""

    url: str
    repository: str
    directory: Path
    faults: Mapping[str, Fault]
    asked: list[str] = field(default_factory=list)


@contextmanager
def hub_with(repository: str, directory: Path, faults: Mapping[str, Fault] | None = None) -> Iterator[Hub]:
    """A hub that has the model under that name, of which `org/gated` wants consent, `hostile/FAULT`, and no other."""
    server = _Server(("127.0.0.1", 0), _Handler)
    hub = server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repository, directory, faults or {})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    hub: Hub
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has had enough has gone, and the rest of an answer with it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # One packet an answer: headers alone would wait for the client to acknowledge them.

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(self.path.partition("?")[0])
        owner, _, model = "/".join(path.removeprefix("/api/models").split("/")[1:3]).partition("/")
        fault = hub.faults.get(model) if owner == HOSTILE else None
        if "org/gated" in path:
            return self._error(403, "GatedRepo")
        if fault is None and f"{owner}/{model}" != hub.repository:
            return self._error(404, "RepoNotFound")
        answer = self._right_answer(f"{owner}/{model}", path)
        if answer is None:
            return self._error(404, "RevisionNotFound")
        if fault is not None:
            fault(answer)
        self._send(answer)

    def _right_answer(self, repository: str, path: str) -> Answer | None:
        """None for a revision that the model does not have."""
        hub = self.server.hub
        if path.startswith(f"/api/models/{repository}/revision/"):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                return None
            described = {"id": repository, "sha": COMMIT, "siblings": []}
            return Answer("revision", self.command, hub.url + path, json.dumps(described).encode(), {})
        if path.startswith(f"/api/models/{repository}/tree/"):
            files = [file for file in sorted(hub.directory.rglob("*")) if file.is_file()]
            entries = [file_entry(file.relative_to(hub.directory).as_posix(), file.read_bytes()) for file in files]
            return Answer("listing", self.command, hub.url + path, json.dumps(entries).encode(), {})
        if path.startswith(f"/{repository}/resolve/"):
            name = path.split("/", 5)[5]
            file = hub.directory / name
            data = file.read_bytes() if file.is_file() else b"{}"
            if self.command == "GET":
                hub.asked.append(name)
            headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return Answer("file", self.command, hub.url + path, data, headers)
        return Answer("other", self.command, hub.url + path, b"{}", {})

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        length = {} if answer.endless else {"Content-Length": str(len(answer.body))}
        for name, value in {"Content-Type": "application/json", **length, **answer.headers}.items():
            self.send_header(name, value)
        if answer.endless:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(answer.body)
            while answer.endless:
                self.wfile.write(answer.body)
        except OSError:  # The client has had enough.
            self.close_connection = True

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def file_entry(name: str, data: bytes) -> dict[str, object]:
    """What a listing says of a file."""
    return {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
