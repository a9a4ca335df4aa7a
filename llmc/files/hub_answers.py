"""A hub's answers about a model, checked before they are used.

Any server may answer at HF_ENDPOINT, such as a mirror or a proxy. The client huggingface_hub builds paths from the
commit hashes, ETags and file names that it receives, and does not check the first two. This module checks the form of
each, that sizes fit on this disk, and that answers are finite.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from llmc.errors import CheckpointError

# Bytes of an answer that is not a file. A listing has at most 1,000 files a page, of about 300 bytes each.
MOST_DESCRIPTION = 64 << 20
_MOST_PAGES = 200
_MOST_REDIRECTS = 20
_MOST_REDIRECTS_OF_A_FILE = 10
_LONGEST_WAIT = 600
_LONGEST_PATH = 1024
_LONGEST_NAME = 255

COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# Also the digests of other hubs: MD5 and a number of parts.
_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_SIZE = re.compile(r"\d{1,16}")
_RANGE = re.compile(r"bytes \d{1,16}-\d{1,16}/\d{1,16}")
_WAIT = re.compile(r"\d+")
_RATE_LIMIT = re.compile(r";\s*t\s*=\s*(\d+)")
_QUESTION = re.compile(r"/(?:api/models/[^/]+/[^/]+/(?P<about>revision|tree)/.|[^/]+/[^/]+/resolve/[^/]+/(?P<file>.+))")


@dataclass
class HubAnswers:
    """The answers of one fetch, each checked against its form and those before it; what does not fit is a
    CheckpointError.

    repository: `org/name`. place: the repository's directory in the cache. wanted: whether a file of that name is
    fetched. commit: the one that is fetched, where the user has named one.
    """

    repository: str
    place: Path
    wanted: Callable[[str], bool]
    commit: str | None = None
    _pages: int = 0
    _redirects: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)
    _longest: int = 0

    def check_headers(self, method: str, asked: str, status: int, headers: Mapping[str, str]) -> None:
        """Check an answer's headers, and raise the error of an answer that does not fit its question.

        method: the method of the request. asked: the URL before redirects. headers: the headers by name; case does not
        matter.
        """
        commit = headers.get("X-Repo-Commit")
        if commit is not None and COMMIT.fullmatch(commit) is None:
            self._refuse(asked, f"names the commit {_shown(commit)}, which is not 40 hexadecimal digits")
        if commit is not None and self.commit not in (None, commit):
            self._refuse(asked, f"is about the commit {commit}, not {self.commit}")
        self._check_lengths(asked, headers)
        self._check_waits(asked, headers)
        if "Location" in headers:
            self._check_redirect(asked, headers["Location"])
        if method == "HEAD" and (commit is not None or status == 200):
            self._check_file(asked, status, headers)

    def longest_body(self, asked: str) -> int | None:
        """Bytes that the body may have; None if no answer has told the sizes of the files."""
        question = _question(asked)
        if question is not None and question["about"]:
            return MOST_DESCRIPTION
        return max(self._longest, MOST_DESCRIPTION) if self._longest else None

    def check_body(self, asked: str, body: Callable[[], bytes], encoding: str | None) -> None:
        """Check an answer's body, if the answer describes the model. body: reads it. encoding: its compression."""
        question = _question(asked)
        if question is None or not question["about"]:
            return
        if encoding not in (None, "identity"):
            self._refuse(asked, f"is compressed ({_shown(encoding)}), which was not asked for")
        try:
            described = json.loads(body())
        except (ValueError, RecursionError):
            self._refuse(asked, "is not JSON")
        if question["about"] == "revision":
            self._check_revision(asked, described)
        else:
            self._check_listing(asked, described)

    def too_long(self, asked: str, longest: int) -> NoReturn:
        """Refuse a body that goes on after `longest` bytes."""
        self._refuse(asked, f"has more than {longest:,} bytes, and no file of the model is that long")

    def _check_revision(self, asked: str, described: Any) -> None:
        if not isinstance(described, dict):
            self._refuse(asked, f"is {_shown(described)}, not a JSON object that describes the model")
        commit = described.get("sha")
        if not isinstance(commit, str) or COMMIT.fullmatch(commit) is None:
            named = "no commit" if commit is None else f"the commit {_shown(commit)}"
            self._refuse(asked, f"names {named} (`sha`), where 40 hexadecimal digits are needed")
        self.commit = commit

    def _check_listing(self, asked: str, entries: Any) -> None:
        self._pages += 1
        if self._pages > _MOST_PAGES:
            self._refuse(asked, f"has more than {_MOST_PAGES} pages of files")
        if not isinstance(entries, list):
            self._refuse(asked, f"is {_shown(entries)}, not a list of files")
        for entry in entries:
            if not isinstance(entry, dict):
                self._refuse(asked, f"lists {_shown(entry)}, which does not describe a file")
            self._check_entry(asked, entry)
        self._check_room(asked)

    def _check_entry(self, asked: str, entry: dict[str, Any]) -> None:
        name = entry.get("path")
        if not isinstance(name, str) or not _is_relative_name(name):
            self._refuse(asked, f"lists a file called {_shown(name)}, which is not a relative path of a file")
        folders = {folder.as_posix() for folder in Path(name).parents} - {"."}
        hash = entry.get("oid")
        if not isinstance(hash, str) or _HASH.fullmatch(hash) is None:
            self._refuse(asked, f"gives {name} the hash {_shown(hash)}, which is not 40 or 64 hexadecimal digits")
        if entry.get("type") != "file":
            self._folders |= {name, *folders}
            self._check_kinds(asked, name, folders)
            return
        size = self._size(asked, name, entry.get("size"))
        large = entry.get("lfs")
        if large is not None:
            if not isinstance(large, dict) or _HASH.fullmatch(str(large.get("oid"))) is None:
                self._refuse(asked, f"says of {name} that its `lfs` is {_shown(large)}, which has no hash (`oid`)")
            size = self._size(asked, name, large.get("size"))
            self._size(asked, name, large.get("pointerSize"))
        self._folders |= folders
        self._sizes[name] = size
        self._longest = max(self._longest, size)
        self._check_kinds(asked, name, folders)

    def _check_kinds(self, asked: str, name: str, folders: set[str]) -> None:
        clashes = {name, *folders} & self._folders & self._sizes.keys()
        if clashes:
            self._refuse(asked, f"lists {min(clashes)} as a file and as a directory")

    def _size(self, asked: str, name: str, size: object) -> int:
        if type(size) is not int or _SIZE.fullmatch(str(size)) is None:
            self._refuse(asked, f"says that {name} has {_shown(size)} bytes, which is not the size of a file")
        return size

    def _check_room(self, asked: str) -> None:
        """Refuse files for which the disk of the cache has no room; the ones that it has already count nothing."""
        snapshot = self.place / "snapshots" / (self.commit or "")
        missing = {name: size for name, size in self._sizes.items() if self.wanted(name)}
        missing = {name: size for name, size in missing.items() if not (snapshot / name).exists()}
        folder = next(folder for folder in (self.place, *self.place.parents) if folder.is_dir())
        needed, free = sum(missing.values()), shutil.disk_usage(folder).free
        if needed > free:
            largest = max(missing, key=lambda name: missing[name])
            raise CheckpointError(
                f"there is no room for {self.repository}: {needed:,} bytes are needed, {free:,} are free "
                f"({largest} alone has {missing[largest]:,})",
                at=folder,
                fix="free some space, or set HF_HOME to a directory on another disk",
            )

    def _check_file(self, asked: str, status: int, headers: Mapping[str, str]) -> None:
        etag = headers.get("X-Linked-Etag") or headers.get("ETag")
        if etag is not None and _ETAG.fullmatch(etag.removeprefix("W/").strip('"')) is None:
            self._refuse(asked, f"names the file's content {_shown(etag)} (ETag), which is not a hash")
        size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if status == 200 else None)
        question = _question(asked)
        name = unquote(question["file"]) if question is not None and question["file"] else None
        if size is None or status not in (200, 301, 302, 303, 307, 308):
            return
        if name in self._sizes and self._sizes[name] != int(size):
            self._refuse(asked, f"says that {name} has {size} bytes, and its listing {self._sizes[name]}")
        self._longest = max(self._longest, int(size))

    def _check_redirect(self, asked: str, address: str) -> None:
        scheme = address.partition(":")[0] if ":" in address.partition("/")[0] else ""
        if scheme not in ("", "http", "https"):
            self._refuse(asked, f"leads to an address of the kind {_shown(scheme)}, not http or https")
        self._redirects += 1
        if self._redirects > _MOST_REDIRECTS + _MOST_REDIRECTS_OF_A_FILE * len(self._sizes):
            self._refuse(asked, "leads from address to address without end")

    def _check_lengths(self, asked: str, headers: Mapping[str, str]) -> None:
        for header, form in (("X-Linked-Size", _SIZE), ("Content-Length", _SIZE), ("Content-Range", _RANGE)):
            value = headers.get(header)
            if value is not None and form.fullmatch(value) is None:
                self._refuse(asked, f"has the {header} {_shown(value)}, which is not a number of bytes")

    def _check_waits(self, asked: str, headers: Mapping[str, str]) -> None:
        retry = _WAIT.fullmatch(headers.get("Retry-After", "").strip())
        rate = _RATE_LIMIT.search(headers.get("RateLimit", ""))
        for wait in (retry and retry[0], rate and rate[1]):
            if wait and (len(wait) > 9 or int(wait) > _LONGEST_WAIT):
                self._refuse(asked, f"asks for a pause of {wait:.20} seconds, and {_LONGEST_WAIT} are waited at most")

    def _refuse(self, asked: str, problem: str) -> NoReturn:
        raise CheckpointError(
            f"the hub's answer about {self.repository} {problem}",
            at=asked,
            fix="set HF_ENDPOINT to another hub, or check whether a proxy answers in its place",
        )


def _is_relative_name(name: str) -> bool:
    """Whether a file can be called so inside a directory, and nowhere else."""
    parts = name.split("/")
    return (
        len(name) <= _LONGEST_PATH
        and all(part not in ("", ".", "..") and len(part.encode(errors="replace")) <= _LONGEST_NAME for part in parts)
        and not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 or c == "\\" for c in name)
    )


def _question(asked: str) -> re.Match[str] | None:
    return _QUESTION.search(urlsplit(asked).path)


def _shown(value: object) -> str:
    """Return a value as it was sent, shortened and without control characters."""
    return ascii(value)[:80]
