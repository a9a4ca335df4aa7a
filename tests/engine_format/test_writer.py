"""Writing engines: whole or absent, the same bytes each time, nothing of others deleted, a full disk said plainly."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch

from llmc.engine_format import chunk_hash, read_engine
from llmc.engine_format.weight_file import ALIGNMENT, plan_shards, read_header
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError
from llmc.files import atomic_directory
from llmc.files.atomic_directory import AtomicDirectory, exchange_by_renaming
from llmc.files.mapped_file import HUGE_PAGE_BYTES
from llmc.program import Layout, WeightSlot
from tests.runtime.tiny_engine import tiny_manifest, tiny_model, write_tiny_engine


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def slot(name: str, data: npt.NDArray[np.float32], dtype: str = "F32", layout: Layout = Layout.ROWS) -> WeightSlot:
    return WeightSlot(name, dtype, data.shape, layout, data.nbytes)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Files cannot grow past `limit` bytes: what a quota or a full disk looks like to the writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_same_inputs_same_bytes(tmp_path: Path) -> None:
    first = write_tiny_engine(tmp_path / "a" / "x.llmc")
    second = write_tiny_engine(tmp_path / "b" / "y.llmc")
    assert contents(first) == contents(second)
    assert contents(write_tiny_engine(tmp_path / "b" / "y.llmc")) == contents(first), "replacing gives the same"
    assert names(tmp_path / "b") == ["y.llmc"]


def test_weights_are_aligned_safetensors(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5, dtype=np.float32), "b": np.ones((3, 7), np.float32), "c": np.array(2.0, np.float32)}
    half = torch.arange(6).bfloat16().reshape(2, 3)
    packed = WeightSlot("panels", "BF16", (2, 3), Layout.PANELS, half.nbytes)
    done: list[int] = []
    with EngineWriter(tmp_path / "e.llmc") as writer:
        weights = [(slot(name, array), lambda array=array: array) for name, array in arrays.items()]
        writer.write_weights([*weights, (packed, lambda: half)], progress=done.append)
        writer.finish(tiny_manifest(tiny_model()))
    path = tmp_path / "e.llmc" / "weights" / "rank0-0000.safetensors"
    assert all(
        t.begin % ALIGNMENT == 0
        for name, t in read_header(memoryview(path.read_bytes()), path).items()
        if not name.startswith("padding.")
    )
    loaded = safetensors.torch.load_file(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name].numpy(), array)
    assert torch.equal(loaded["panels"], half.flatten())
    assert done == [20, 84, 4, 12]


def test_chunks_that_are_hashed_side_by_side_have_their_own_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that end within a chunk, span several, and are too small to be shared among threads."""
    monkeypatch.setattr(chunk_hash, "CHUNK_BYTES", 3 << 20)
    arrays = [np.random.default_rng(i).random(size, np.float32) for i, size in enumerate((500_000, 3_000_000, 10))]
    weights = [(slot(f"w{i}", array), lambda array=array: array) for i, array in enumerate(arrays)]
    with EngineWriter(tmp_path / "e.llmc") as writer:
        writer.write_weights(weights)
        manifest = writer.finish(tiny_manifest(tiny_model()))
    ((name, record),) = manifest.files.items()
    data = (tmp_path / "e.llmc" / name).read_bytes()
    pieces = [data[i : i + (3 << 20)] for i in range(0, len(data), 3 << 20)]
    assert len(pieces) > 4 and record.bytes == len(data)
    assert list(record.sha256) == [hashlib.sha256(piece).hexdigest() for piece in pieces]


def test_weights_are_written_in_whole_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their sizes: the page cache then holds them so, and who maps the file gets them so."""
    lengths: list[int] = []
    write = os.write

    def counted(descriptor: int, data: memoryview) -> int:
        lengths.append(len(data))
        return write(descriptor, data)

    page = HUGE_PAGE_BYTES // 4
    sizes = (3, page - 5, 5 * page + 1, page, 7, 2 * page)
    arrays = {f"w{i}": np.random.default_rng(i).random(size, np.float32) for i, size in enumerate(sizes)}
    weights = [(slot(name, array), lambda array=array: array) for name, array in arrays.items()]
    with EngineWriter(tmp_path / "e.llmc") as writer:
        monkeypatch.setattr(os, "write", counted)
        writer.write_weights(weights)
        monkeypatch.undo()
        writer.finish(tiny_manifest(tiny_model()))
    assert len(lengths) > 2 and all(length % HUGE_PAGE_BYTES == 0 for length in lengths[:-1])
    loaded = safetensors.torch.load_file(tmp_path / "e.llmc" / "weights" / "rank0-0000.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name].numpy(), array)


def test_shards_keep_the_order_and_the_limit() -> None:
    slots = [WeightSlot(str(i), "U8", (n,), Layout.ROWS, n) for i, n in enumerate((4, 5, 20, 1, 9))]
    assert [[s.name for s in shard] for shard in plan_shards(slots, 10)] == [["0", "1"], ["2"], ["3", "4"]]
    assert plan_shards([]) == ()


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), EngineWriter(tmp_path / "e.llmc") as writer:
        writer.write_text("program.json", "{}")
        raise KeyError
    with EngineWriter(tmp_path / "e.llmc") as writer:
        writer.write_text("program.json", "{}")
    assert names(tmp_path) == []


def test_an_old_engine_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = write_tiny_engine(tmp_path / "e.llmc")
    before = contents(path)
    with pytest.raises(KeyError), EngineWriter(path):
        assert contents(path) == before
        raise KeyError
    assert contents(path) == before
    write_tiny_engine(path, model=tiny_model(seed=1))
    assert contents(path) != before
    read_engine(path)
    assert names(tmp_path) == ["e.llmc"]


def test_directories_can_be_swapped_without_the_system_call(tmp_path: Path) -> None:
    new, old = tmp_path / ".e.0.llmc-tmp", tmp_path / "e"
    for path in (new, old):
        path.mkdir()
        (path / path.name).touch()
    exchange_by_renaming(new, old)
    assert names(old) == [new.name] and names(new) == [old.name]
    assert names(tmp_path) == [new.name, old.name]


@pytest.mark.parametrize("has_system_call", [True, False])
@pytest.mark.parametrize("replaces", [False, True])
def test_of_two_builders_to_one_output_the_last_wins_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, has_system_call: bool
) -> None:
    """Each has looked at the destination, and both rename at once; neither fails, and nothing else is left."""
    path = tmp_path / "e.llmc"
    if replaces:
        write_tiny_engine(path, model=tiny_model(seed=9))
    if not has_system_call:
        monkeypatch.setattr(atomic_directory, "_exchange_at_once", lambda new, old: False)
    both_are_ready = threading.Barrier(2)
    have_waited: set[int] = set()
    rename = Path.rename

    def held(self: Path, target: Path) -> Path:
        if threading.get_ident() not in have_waited:
            have_waited.add(threading.get_ident())
            both_are_ready.wait(60)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", held)
    errors = in_threads(*(lambda seed=seed: write_tiny_engine(path, model=tiny_model(seed=seed)) for seed in (0, 1)))
    monkeypatch.undo()
    assert errors == []
    assert contents(path) in [contents(write_tiny_engine(tmp_path / str(s), model=tiny_model(seed=s))) for s in (0, 1)]
    assert names(tmp_path) == ["0", "1", "e.llmc"]


def test_a_builder_that_comes_between_two_renames_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where directories cannot be swapped at once there is nothing at the destination for a moment."""
    path = write_tiny_engine(tmp_path / "e.llmc", model=tiny_model(seed=9))
    monkeypatch.setattr(atomic_directory, "_exchange_at_once", lambda new, old: False)
    rename = Path.rename
    others: Iterator[Callable[[], Path]] = iter([lambda: write_tiny_engine(path, model=tiny_model(seed=1))])

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if self == path:
            for build in others:
                build()
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    write_tiny_engine(path, model=tiny_model(seed=0))
    monkeypatch.undo()
    assert contents(path) == contents(write_tiny_engine(tmp_path / "0", model=tiny_model(seed=0)))
    assert names(tmp_path) == ["0", "e.llmc"]


def test_processes_that_write_one_engine_again_and_again(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from llmc.engine_format import read_engine
        from llmc.engine_format.copy import copy_engine
        source, path = Path(sys.argv[1]), Path(sys.argv[2])
        manifest = read_engine(source).manifest
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(30):
            copy_engine(source, manifest, path)
    """
    sources = [write_tiny_engine(tmp_path / f"{seed}.llmc", model=tiny_model(seed=seed)) for seed in (0, 1)]
    path = tmp_path / "e.llmc"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(source), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source in sources
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    said = in_threads(*(lambda writer=writer: writer.communicate("go\n", timeout=120) for writer in writers))
    assert said == [] and [writer.returncode for writer in writers] == [0, 0]
    assert contents(path) in [contents(source) for source in sources]
    assert names(tmp_path) == ["0.llmc", "1.llmc", "e.llmc"]


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """What the calls raise, all made at once."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_what_is_no_engine_is_never_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "thesis.tex").write_text("years of work")
    with pytest.raises(EngineFormatError, match="not an engine, so it is not replaced"):
        EngineWriter(kept)
    with pytest.raises(EngineFormatError, match="is a file"):
        EngineWriter(kept / "thesis.tex")
    with pytest.raises(EngineFormatError, match="cannot create a directory"):
        EngineWriter(kept / "thesis.tex" / "e.llmc")
    assert contents(kept) == {"thesis.tex": b"years of work"}
    (tmp_path / "empty").mkdir()
    read_engine(write_tiny_engine(tmp_path / "empty"))


def test_something_that_appears_during_the_build_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "e.llmc"
    with pytest.raises(EngineFormatError, match="not replaced"), EngineWriter(path) as writer:
        path.mkdir()
        (path / "notes").write_text("mine")
        writer.finish(tiny_manifest(tiny_model()))
    assert contents(path) == {"notes": b"mine"}
    assert names(tmp_path) == ["e.llmc"]


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../b", "a//b", "", ".", "a\\b"])
def test_file_names_cannot_leave_the_engine(tmp_path: Path, name: str) -> None:
    with EngineWriter(tmp_path / "e.llmc") as writer, pytest.raises(EngineFormatError, match="is not allowed"):
        writer.write_text(name, "x")


def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(10_000), pytest.raises(EngineFormatError, match="no room for the engine") as caught:
        write_tiny_engine(tmp_path / "e.llmc")
    assert "bytes are needed" in caught.value.problem and "bytes are free" in caught.value.problem
    assert caught.value.fix is not None and "free some space" in caught.value.fix
    assert names(tmp_path) == []


def test_a_file_that_cannot_be_copied(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "e.llmc") as writer, pytest.raises(EngineFormatError, match="No such file") as caught:
        writer.copy_file("tokenizer/tokenizer.json", tmp_path / "nowhere.json")
    assert caught.value.at == str(tmp_path / "nowhere.json")


def test_a_device_without_space(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "e.llmc") as writer:
        (writer.path / "program.json").symlink_to("/dev/full")
        with pytest.raises(EngineFormatError, match="No space left on device"):
            writer.write_text("program.json", "{}")
    assert names(tmp_path) == []


def test_no_room_is_seen_before_anything_is_computed(tmp_path: Path) -> None:
    huge = WeightSlot("w", "F32", (1 << 60,), Layout.ROWS, 4 << 60)
    with (
        EngineWriter(tmp_path / "e.llmc") as writer,
        pytest.raises(EngineFormatError, match=str((4 << 60) + (1 << 20))),
    ):
        writer.write_weights([(huge, lambda: pytest.fail("was packed"))])


def test_a_wrongly_packed_weight_is_an_error(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    with (
        EngineWriter(tmp_path / "e.llmc") as writer,
        pytest.raises(EngineFormatError, match="12 bytes, its slot has 16"),
    ):
        writer.write_weights([(slot("w", array), lambda: array[:3])])


def test_a_killed_build_leaves_nothing_that_loads_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from llmc.engine_format.writer import EngineWriter
        writer = EngineWriter(Path(sys.argv[1]))
        writer.write_text("program.json", "{}")
        (writer.path / "manifest.json").write_text("{}")
        print(writer.path, flush=True)
        sys.stdin.read()
    """
    path = tmp_path / "e.llmc"
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        other = AtomicDirectory(path, lambda _: False)
        assert left.exists(), "a living build's directory is left alone"
        other.__exit__(None, None, None)
        process.send_signal(signal.SIGKILL)
    assert left.exists() and not path.exists()
    with pytest.raises(EngineFormatError, match="unfinished build"):
        read_engine(left)
    read_engine(write_tiny_engine(path))
    assert names(tmp_path) == ["e.llmc"]


def test_killed_at_any_moment_the_engine_is_whole(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from llmc.engine_format import read_engine
        from llmc.engine_format.copy import copy_engine
        source, path = Path(sys.argv[1]), Path(sys.argv[2])
        manifest = read_engine(source).manifest
        print("ready", flush=True)
        while True:
            copy_engine(source, manifest, path)
    """
    source, path = write_tiny_engine(tmp_path / "source.llmc"), tmp_path / "e.llmc"
    command = [sys.executable, "-c", textwrap.dedent(script), str(source), str(path)]
    generator = np.random.default_rng(0)
    for _ in range(8):
        was_there = path.exists()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while not was_there and not path.exists():  # the first one may be slow
                time.sleep(0.001)
            time.sleep(generator.uniform(0, 0.05))
            process.kill()
        if was_there or path.exists():
            assert read_engine(path).manifest == read_engine(source).manifest
    assert path.exists()
