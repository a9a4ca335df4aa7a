"""A Hugging Face hub of one model on this machine: what its client asks of the real one, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@dataclass
class Hub:
    """directory: the model's files. asked: the files that were fetched."""

    url: str
    repository: str
    directory: Path
    asked: list[str] = field(default_factory=list)


@contextmanager
def hub_with(repository: str, directory: Path) -> Iterator[Hub]:
    """A hub that has the model under that name, of which `org/gated` wants consent, and no other."""
    server = _Server(("127.0.0.1", 0), _Handler)
    hub = server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repository, directory)
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


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server.hub
        path = self.path.partition("?")[0]
        if "org/gated" in path:
            return self._error(403, "GatedRepo")
        if path.startswith(f"/api/models/{hub.repository}/revision/"):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                return self._error(404, "RevisionNotFound")
            return self._send(json.dumps({"id": hub.repository, "sha": COMMIT, "siblings": []}).encode(), {})
        if path.startswith(f"/api/models/{hub.repository}/tree/"):
            files = [file for file in sorted(hub.directory.rglob("*")) if file.is_file()]
            entries = [_entry(hub.directory, file) for file in files]
            return self._send(json.dumps(entries).encode(), {})
        if path.startswith(f"/{hub.repository}/resolve/"):
            name = path.split("/", 5)[5]
            data = (hub.directory / name).read_bytes()
            if with_body:
                hub.asked.append(name)
            return self._send(data, {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, with_body)
        self._error(404, "RepoNotFound")

    def _send(self, data: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(directory: Path, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {
        "type": "file",
        "path": file.relative_to(directory).as_posix(),
        "size": len(data),
        "oid": sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
