"""`llmc cache`: what is there, how big, when it was used, and removing it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.cache import CacheKind, open_cache
from llmc.cli.units import ago
from llmc.files.mapped_file import mapped_file
from llmc.settings import settings
from tests.cli.command import assert_user_error, llmc


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with an entry of each kind, used one hour ago and more, of at most a gigabyte."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMC_CACHE_SIZE", "1GB")
    monkeypatch.setenv("COLUMNS", "80")
    settings.cache_clear()
    for hours, kind in enumerate(CacheKind, start=1):
        folder = open_cache(kind)
        entry = folder.path / (f"{kind.value}-" + "0123456789abcdef" * 4)
        entry.write_text("x" * 1500)
        os.utime(entry, (time.time() - 3600 * hours - 60,) * 2)
    yield tmp_path / "cache"
    settings.cache_clear()


def test_kinds_with_their_sizes_and_when_they_were_used(cache: Path) -> None:
    shown = llmc("cache").out.splitlines()
    assert shown[0] == f"{cache}: {len(CacheKind) * 1.5} kB of at most 1.0 GB"
    assert all(len(line) <= 80 for line in shown[1:])
    for hours, kind in enumerate(CacheKind, start=1):
        (line,) = [line for line in shown[1:] if line.startswith(f"│ {kind.value} ")]
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells[1:4] == ["1", "1.5 kB", f"{hours} hour{'s' if hours > 1 else ''} ago"]


def test_sizes_are_not_coloured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in llmc("cache").out.splitlines()[0]


def test_entries_and_json(cache: Path) -> None:
    shown = llmc("cache", "--entries").out.splitlines()
    assert all(len(line) <= 80 for line in shown[1:])
    assert sum("1.5 kB" in line for line in shown) == len(CacheKind)
    content = json.loads(llmc("cache", "--json").out)
    assert (content["directory"], content["bytes"], content["limit_bytes"]) == (
        str(cache),
        len(CacheKind) * 1500,
        10**9,
    )
    assert [entry["kind"] for entry in content["entries"]] == [kind.value for kind in CacheKind]
    assert content["entries"][0]["name"].startswith("engines-") and content["entries"][0]["bytes"] == 1500


def test_clear_removes_a_kind_or_all_but_what_is_in_use(cache: Path) -> None:
    assert llmc("cache", "clear", "captures").out == "removed 1 entry, 1.5 kB\n"
    assert list((cache / "captures").iterdir()) == []
    (engine,) = (cache / "engines").iterdir()
    with engine.open("rb") as file:
        weights = mapped_file(file.fileno())
    cleared = json.loads(llmc("cache", "clear", "--json").out)
    assert len(cleared["removed"]) == len(CacheKind) - 2
    assert [entry["name"] for entry in cleared["in_use"]] == [engine.name]
    assert f"in use, not removed: {engine}" in llmc("cache", "clear").out
    del weights
    assert llmc("cache", "clear").out == "removed 1 entry, 1.5 kB\n"
    assert llmc("cache").out == f"{cache}: 0 B of at most 1.0 GB\n"


def test_a_cache_that_is_not_there_or_not_ones_own(cache: Path) -> None:
    (cache / "kernels").chmod(0o777)
    assert_user_error(llmc("cache", "clear", "kernels"), "may be written by others (mode 777)", "chmod -R go-w")
    assert len(list((cache / "kernels").iterdir())) == 1
    cache.rename(cache.with_name("elsewhere"))
    assert llmc("cache").out == f"{cache}: 0 B of at most 1.0 GB\n"
    assert llmc("cache", "clear").out == "removed 0 entries, 0 B\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "just now"), (61, "1 minute ago"), (7300, "2 hours ago"), (90_000, "1 day ago")]
)
def test_times_since_the_last_use(seconds: float, text: str) -> None:
    assert ago(seconds) == text
