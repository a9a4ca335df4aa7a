"""huggingface_hub's HTTP client, whose answers are checked before the library uses them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmc.files.hub_answers import HubAnswers

# The client is the process's: two fetches at once would take each other's checks away.
_ONE_FETCH = threading.Lock()
_ASKED = "llmc_asked"
# Seconds until a hub that says nothing counts as away.
_SILENCE = 60.0


@contextmanager
def checked_client(answers: HubAnswers) -> Iterator[None]:
    """While it is open, each answer to a question of huggingface_hub passes these checks first.

    A client that the user has set stays in use (`set_client_factory`), and is again as it was afterwards.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    with _ONE_FETCH:
        make_client = _http._GLOBAL_CLIENT_FACTORY

        def make_checked() -> Any:  # The library makes another client after a broken connection.
            client = make_client()
            client.event_hooks["request"].append(_prepare)
            client.event_hooks["response"].append(lambda response: _check(answers, response))
            return client

        set_client_factory(make_checked)
        try:
            yield
        finally:
            set_client_factory(make_client)


def _prepare(request: Any) -> None:
    """Redirected requests share the first one's extensions: the original request stays known."""
    request.extensions.setdefault(_ASKED, str(request.url))
    request.headers["Accept-Encoding"] = "identity"
    limits = request.extensions.setdefault("timeout", {})
    for part in ("connect", "read", "write", "pool"):
        if limits.get(part) is None:
            limits[part] = _SILENCE


def _check(answers: HubAnswers, response: Any) -> None:
    request = response.request
    url = request.extensions[_ASKED]
    answers.check_headers(request.method, url, response.status_code, response.headers)
    longest = answers.longest_body(url)
    if longest is not None:
        response.stream = _bounded(answers, url, response, longest)
    if request.method == "GET" and response.status_code == 200:
        answers.check_body(url, response.read, response.headers.get("Content-Encoding"))


def _bounded(answers: HubAnswers, asked: str, response: Any, longest: int) -> Any:
    """The body's stream; it raises an error once it exceeds a number of bytes."""
    package = sys.modules[type(response).__module__.partition(".")[0]]  # httpx or httpx2, as the library has it.
    stream = response.stream

    class Bounded(package.SyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[bytes]:
            count = 0
            for part in stream:
                count += len(part)
                if count > longest:
                    answers.too_long(asked, longest)
                yield part

        def close(self) -> None:
            stream.close()

    return Bounded()
