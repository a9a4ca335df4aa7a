"""What a hub can answer wrongly, by name, and a word of the error that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from tempfile import gettempdir
from typing import Any
from urllib.parse import urlsplit

from tests.hub_server import HOSTILE, Answer, Fault, file_entry

UP = "../" * 4
ESCAPED = "written-by-a-hostile-hub"
ROOT = f"{gettempdir()}/{ESCAPED}"
ANOTHER = "b" * 40


def revision(change: Callable[[dict[str, Any]], Any]) -> Fault:
    """Another description of the revision."""
    return _json("revision", change)


def listing(change: Callable[[list[Any]], Any]) -> Fault:
    """Another listing of the files."""
    return _json("listing", change)


def entry(**fields: object) -> Fault:
    """A file more, of which the listing says this."""
    return listing(lambda entries: [*entries, {**file_entry("generation_config.json", b"{}"), **fields}])


def header(name: str, value: str, about: str = "file", method: str | None = None, status: int = 200) -> Fault:
    """That header in the answers about this."""

    def fault(answer: Answer) -> None:
        if answer.about == about and answer.method == (method or answer.method):
            answer.headers[name] = value
            answer.status = status

    return fault


def body(about: str, data: bytes, *, endless: bool = False) -> Fault:
    """That body in place of the right one; headers that are asked for alone stay right."""

    def fault(answer: Answer) -> None:
        if answer.about == about and answer.method == "GET":
            answer.body, answer.endless = data, endless

    return fault


def without(name: str) -> Fault:
    """No such header."""
    return lambda answer: _leave_out(answer, name)


def redirected(about: str, then: Fault) -> Fault:
    """The question leads to another address, and what is there has a fault."""

    def fault(answer: Answer) -> None:
        if answer.about == about:
            model = urlsplit(answer.url).path.split("/")[4]
            answer.status, answer.headers = 302, {"Location": f"/{HOSTILE}/{model}/elsewhere"}
        elif answer.about == "other":
            answer.about = about  # type: ignore[assignment]
            then(answer)

    return fault


def later(right: int, then: Fault) -> Fault:
    """Right answers first, and then the fault."""
    left = [right]

    def fault(answer: Answer) -> None:
        left[0] -= 1
        if left[0] < 0:
            then(answer)

    return fault


def _json(about: str, change: Callable[[Any], Any]) -> Fault:
    def fault(answer: Answer) -> None:
        if answer.about == about:
            answer.body = json.dumps(change(json.loads(answer.body))).encode()

    return fault


def _leave_out(answer: Answer, name: str) -> None:
    answer.headers.pop(name, None)


def _around(answer: Answer) -> None:
    answer.status, answer.headers = 302, {"Location": urlsplit(answer.url).path}


def _pages(answer: Answer) -> None:
    if answer.about == "listing":
        answer.body, answer.headers = b"[]", {"Link": f'<{answer.url}>; rel="next"'}


OUTSIDE: dict[str, tuple[Fault, str]] = {
    # What would be written outside the cache.
    "commit-up": (revision(lambda told: {**told, "sha": UP + ESCAPED}), "names the commit '../"),
    "commit-root": (revision(lambda told: {**told, "sha": ROOT}), "names the commit '/"),
    "commit-up-elsewhere": (
        redirected("revision", lambda answer: _give(answer, {"sha": UP + ESCAPED})),
        "names the commit '../",
    ),
    "etag-up": (header("ETag", f'"{UP}{ESCAPED}"'), "(ETag), which is not a hash"),
    "etag-weak-up": (header("ETag", f'W/"{UP}{ESCAPED}"'), "(ETag), which is not a hash"),
    "etag-root": (header("ETag", ROOT), "(ETag), which is not a hash"),
    "etag-dots": (header("ETag", '".."'), "(ETag), which is not a hash"),
    "linked-etag-up": (header("X-Linked-Etag", f'"{UP}{ESCAPED}"'), "(ETag), which is not a hash"),
    "etag-up-later": (later(4, header("ETag", f'"{UP}{ESCAPED}"')), "(ETag), which is not a hash"),
    "header-commit-up": (header("X-Repo-Commit", UP + ESCAPED), "names the commit '../"),
    "missing-commit-up": (header("X-Repo-Commit", UP + ESCAPED, status=404), "names the commit '../"),
    "header-commit-other": (header("X-Repo-Commit", ANOTHER), f"is about the commit {ANOTHER}"),
    "name-up": (entry(path=f"{UP}{ESCAPED}.json"), "not a relative path"),
    "name-inside-up": (entry(path=f"a/{UP}{ESCAPED}.json"), "not a relative path"),
    "name-root": (entry(path=f"{ROOT}.json"), "not a relative path"),
    "name-backslash": (entry(path=f"..\\..\\{ESCAPED}.json"), "not a relative path"),
    "large-hash-up": (
        entry(lfs={"oid": UP + ESCAPED, "size": 2, "pointerSize": 120}, xetHash="c" * 64),
        "which has no hash",
    ),
}

MALFORMED: dict[str, tuple[Fault, str]] = {
    "no-commit": (revision(lambda told: {}), "names no commit"),
    "commit-null": (revision(lambda told: {**told, "sha": None}), "names no commit"),
    "commit-number": (revision(lambda told: {**told, "sha": 7}), "names the commit 7"),
    "commit-list": (revision(lambda told: {**told, "sha": ["a" * 40]}), "names the commit ['aaa"),
    "commit-short": (revision(lambda told: {**told, "sha": "abc"}), "names the commit 'abc'"),
    "model-is-a-list": (revision(lambda told: [told]), "not a JSON object"),
    "model-is-a-number": (revision(lambda told: 3), "not a JSON object"),
    "model-is-a-page": (body("revision", b"<html>Please log in</html>"), "is not JSON"),
    "model-is-nothing": (body("revision", b""), "is not JSON"),
    "model-is-deep": (body("revision", b"[" * 100_000), "is not JSON"),
    "model-is-endless": (body("revision", b" " * (1 << 20), endless=True), "has more than"),
    "model-compressed": (header("Content-Encoding", "gzip", "revision"), "is compressed"),
    "other-fields": (revision(lambda told: {**told, "siblings": 5, "createdAt": {}}), "does not describe a model"),
    "listing-is-an-object": (listing(lambda entries: {"error": "none"}), "not a list of files"),
    "listing-of-numbers": (listing(lambda entries: [1, 2]), "lists 1, which does not describe a file"),
    "listing-without-end": (_pages, "pages of files"),
    "no-name": (listing(lambda entries: [{"type": "file", "size": 2, "oid": "a" * 40}]), "called None"),
    "name-nul": (entry(path="config\0.json"), "not a relative path"),
    "name-number": (entry(path=5), "called 5"),
    "name-surrogate": (entry(path="\udc80.json"), "not a relative path"),
    "name-empty": (entry(path=""), "not a relative path"),
    "name-long": (entry(path="a" * 300 + ".json"), "not a relative path"),
    "name-of-a-directory": (entry(path="config.json/a.json"), "as a file and as a directory"),
    "no-hash": (entry(oid=None), "gives generation_config.json the hash None"),
    "hash-number": (entry(oid=12), "the hash 12"),
    "size-negative": (entry(size=-5), "has -5 bytes"),
    "size-text": (entry(size="2"), "has '2' bytes"),
    "size-fraction": (entry(size=2.5), "has 2.5 bytes"),
    "size-huge": (entry(size=10**15), "there is no room for hostile/size-huge: 1,000,0"),
    "size-beyond": (entry(size=10**400), "not the size of a file"),
    "size-of-a-large-file": (entry(lfs={"oid": "c" * 64, "size": -1, "pointerSize": 1}), "has -1 bytes"),
    "large-file-is-text": (entry(lfs="yes"), "`lfs` is 'yes'"),
    "length-other": (header("X-Linked-Size", "999999"), "and its listing"),
    "length-negative": (header("X-Linked-Size", "-9"), "not a number of bytes"),
    "length-words": (header("X-Linked-Size", "many"), "not a number of bytes"),
    "length-huge": (header("X-Linked-Size", "9" * 40), "not a number of bytes"),
    "range-words": (header("Content-Range", "bytes */*", method="GET"), "not a number of bytes"),
    "no-etag": (without("ETag"), "is not a Hugging Face hub"),
    "no-header-commit": (without("X-Repo-Commit"), "not a Hugging Face hub"),
    "file-is-endless": (body("file", b"{" * (1 << 20), endless=True), "has more than"),
    "file-is-shorter": (body("file", b"{"), "hostile/file-is-shorter cannot be fetched"),
    "around": (_around, "without end"),
    "around-files": (lambda answer: _around(answer) if answer.about == "file" else None, "without end"),
    "to-a-file": (header("Location", "file:///etc/passwd", status=302), "not http or https"),
    "pause": (header("Retry-After", "9" * 30, "revision", status=429), "asks for a pause"),
    "rate": (header("RateLimit", '"api";r=0;t=99999999', "listing", status=429), "asks for a pause"),
}


def _give(answer: Answer, told: object) -> None:
    answer.body, answer.headers = json.dumps(told).encode(), {}
