"""The cache directory: private, made once, trusted only when nobody else could write it, bounded, and swept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmc.cache import CacheKind, cache_entries, open_cache
from llmc.cache.contents import remove_entry, trim_cache
from llmc.cache.directory import CacheDirectory
from llmc.errors import OptionError
from llmc.files.atomic_directory import AtomicDirectory
from llmc.files.mapped_file import mapped_file
from llmc.settings import read_settings

OTHER_USER = 12345
HOUR = 3600.0


@pytest.fixture
def cache(tmp_path: Path) -> CacheDirectory:
    return open_cache(CacheKind.ENGINES, tmp_path / "cache")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(path: Path, nbytes: int = 10) -> None:
    """A directory entry with a file of that size in it."""
    with AtomicDirectory(path, lambda old: True) as directory:
        (directory.path / "data").write_bytes(bytes(nbytes))
        directory.commit()


def is_whole(path: Path) -> bool:
    return (path / "data").is_file()


def set_used(path: Path, hours_ago: float) -> None:
    """As if it had been used then, and not since."""
    then = time.time() - hours_ago * HOUR
    for entry in [*path.rglob("*"), path]:
        os.utime(entry, (then, then))


def test_it_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        cache = open_cache(CacheKind.ENGINES, tmp_path / "cache")
        entry = cache.find_or_make("entry", is_whole, make)
        cache.write_text("text", "content")
    finally:
        os.umask(before)
    assert mode(tmp_path / "cache") == mode(cache.path) == 0o700
    assert mode(entry) & 0o022 == 0 and mode(entry / "data") & 0o022 == 0 and mode(cache.path / "text") == 0o600
    assert cache.find_or_make("entry", is_whole, lambda path: pytest.fail("it is there")) == entry


def test_an_entry_is_made_once_and_again_when_it_is_broken(cache: CacheDirectory) -> None:
    entry = cache.find_or_make("entry", is_whole, make)
    cache.find_or_make("entry", is_whole, lambda path: pytest.fail("it is there"))
    (entry / "data").unlink()
    cache.find_or_make("entry", is_whole, make)
    assert is_whole(entry) and names(cache.path) == ["entry"]


def test_of_those_who_want_one_entry_one_makes_it(cache: CacheDirectory) -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[Path] = []

    def make_slowly(path: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        made.append(path)
        make(path)

    threads = [threading.Thread(target=cache.find_or_make, args=("entry", is_whole, make_slowly)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    cache.tidy()  # Leaves the lock of the one who makes it.
    assert names(cache.path) == [".entry.lock"]
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and names(cache.path) == ["entry"]


def test_a_maker_that_fails_gives_its_turn_away(cache: CacheDirectory) -> None:
    def fail(path: Path) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        cache.find_or_make("entry", is_whole, fail)
    assert names(cache.path) == []
    assert is_whole(cache.find_or_make("entry", is_whole, make))


@pytest.mark.parametrize("which", ["root", "kind"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, which: str) -> None:
    root = tmp_path / "cache"
    open_cache(CacheKind.KERNELS, root)
    folder = root if which == "root" else root / "kernels"
    folder.chmod(0o777)
    with pytest.raises(OptionError, match=r"may be written by others \(mode 777\)") as caught:
        open_cache(CacheKind.KERNELS, root)
    assert caught.value.at == str(folder) and "chmod -R go-w" in str(caught.value.fix)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_owns_is_refused(tmp_path: Path, cache: CacheDirectory) -> None:
    entry = cache.find_or_make("entry", is_whole, make)
    cache.write_text("text", "content")
    for owned in (entry / "data", cache.path / "text"):
        os.chown(owned, OTHER_USER, OTHER_USER)
    with pytest.raises(
        OptionError, match=rf"entry in the cache belongs to another user \(uid {OTHER_USER}\)"
    ) as caught:
        cache.find_or_make("entry", is_whole, make)
    assert "llmc cache clear engines" in str(caught.value.fix)
    with pytest.raises(OptionError, match="belongs to another user"):
        cache.read_text("text")
    with pytest.raises(OptionError, match="belongs to another user"):
        cache.check_all()
    os.chown(cache.path, OTHER_USER, OTHER_USER)
    with pytest.raises(OptionError, match="so its contents cannot be trusted"):
        open_cache(CacheKind.ENGINES, tmp_path / "cache")


def test_an_entry_that_others_may_write_is_refused(cache: CacheDirectory) -> None:
    entry = cache.find_or_make("entry", is_whole, make)
    (entry / "data").chmod(0o666)
    with pytest.raises(OptionError, match=r"entry in the cache may be written by others \(mode 666\)"):
        cache.find_or_make("entry", is_whole, make)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, cache: CacheDirectory) -> None:
    for age, name in enumerate(("new", "old", "oldest", "used again"), start=1):
        set_used(cache.find_or_make(name, is_whole, lambda path: make(path, 100)), age)
    cache.find_or_make("used again", is_whole, make)
    kernels = open_cache(CacheKind.KERNELS, tmp_path / "cache")
    kernels.write_text("text", "x" * 35)
    set_used(kernels.path / "text", 2.5)
    trim_cache(tmp_path / "cache", 300)
    assert names(cache.path) == ["new", "old", "used again"] and names(kernels.path) == []
    trim_cache(tmp_path / "cache", 0)
    assert names(cache.path) == ["used again"], "it was used within the last minute"


def test_reading_a_file_of_an_entry_is_using_it(tmp_path: Path, cache: CacheDirectory) -> None:
    """Triton does not tell what it uses."""
    for age, name in enumerate(("read", "not read"), start=1):
        set_used(cache.find_or_make(name, is_whole, lambda path: make(path, 100)), 3 - age)
    now = time.time() - 100
    os.utime(cache.path / "read" / "data", (now, 0))
    trim_cache(tmp_path / "cache", 100)
    assert names(cache.path) == ["read"]


def test_what_is_in_use_stays(tmp_path: Path, cache: CacheDirectory) -> None:
    entry = cache.find_or_make("entry", is_whole, make)
    set_used(entry, 1)
    with (entry / "data").open("rb") as file:
        weights = mapped_file(file.fileno())
    trim_cache(tmp_path / "cache", 0)
    assert names(cache.path) == ["entry"] and not remove_entry(entry)
    del weights
    set_used(entry, 1)
    trim_cache(tmp_path / "cache", 0)
    assert names(cache.path) == []


def test_the_bound_is_kept_when_something_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.cache.directory.settings", lambda: read_settings({"LLMC_CACHE_SIZE": "150"}))
    cache = open_cache(CacheKind.ENGINES, tmp_path / "cache")
    set_used(cache.find_or_make("first", is_whole, lambda path: make(path, 100)), 1)
    cache.find_or_make("second", is_whole, lambda path: make(path, 100))
    assert names(cache.path) == ["second"]


def test_a_text_is_whole_or_not_there(cache: CacheDirectory) -> None:
    cache.write_text("text", "two\nlines")
    assert cache.read_text("text") == "two\nlines"
    whole = (cache.path / "text").read_bytes()
    for damaged in (whole[:-1], whole + b"s", b"\0" + whole, whole.replace(b"two", b"\xff\xfe\xfd"), b""):
        (cache.path / "text").write_bytes(damaged)
        assert cache.read_text("text") is None
    assert cache.read_text("another") is None


def test_for_a_small_text_the_bound_is_looked_at_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.cache.directory.settings", lambda: read_settings({"LLMC_CACHE_SIZE": "150"}))
    cache = open_cache(CacheKind.CAPTURES, tmp_path / "cache")
    for number in range(3):
        cache.write_text(f"text {number}", "x" * 35)
        set_used(cache.path / f"text {number}", 10 + number)
    assert names(cache.path) == ["text 0", "text 1", "text 2"]
    set_used(tmp_path / "cache" / ".trimmed", 1)
    cache.write_text("text 3", "x" * 35)
    assert names(cache.path) == ["text 3"]


def test_what_a_killed_builder_left_is_swept_and_what_a_living_one_makes_is_not(cache: CacheDirectory) -> None:
    script = """
import sys
from pathlib import Path
from llmc.files.atomic_directory import AtomicDirectory
from llmc.cache import CacheKind, open_cache
def make(path):
    AtomicDirectory(path, lambda old: True)
    print("making", flush=True)
    sys.stdin.read()
open_cache(CacheKind.ENGINES, Path(sys.argv[1])).find_or_make(sys.argv[2], Path.is_dir, make)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(cache.path.parent), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("killed", "living")
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "making\n"
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        left = [name for name in names(cache.path) if name.startswith(".killed")]
        assert len(left) == 2, "a lock and a directory"
        cache.find_or_make("another", is_whole, make)
        remaining = names(cache.path)
        assert remaining[-1] == "another" and [name[:7] for name in remaining[:-1]] == [".living"] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
    cache.find_or_make("killed", is_whole, make)
    assert names(cache.path) == ["another", "killed"]


def test_entries_are_described(cache: CacheDirectory) -> None:
    entry = cache.find_or_make("entry", is_whole, lambda path: make(path, 1000))
    (described,) = cache_entries(cache.path.parent)
    assert (described.kind, described.path, described.nbytes) == (CacheKind.ENGINES, entry, 1000)
    assert abs(described.used - time.time()) < 600
    shutil.rmtree(cache.path.parent)
    assert cache_entries(cache.path.parent) == []
