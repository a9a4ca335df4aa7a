"""Weights are compared beside an engine's start; a wrong one is found before anything that it led to is seen."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.engine_format import start_engine, weight_check
from llmc.engine_format.chunk_hash import check_chunk
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import EngineFormatError
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.tiny_engine import copied

ONE = SamplingParams(max_tokens=1)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 16]))


@pytest.fixture
def engine(draft_engine: Path, tmp_path: Path) -> Path:
    return copied(draft_engine, tmp_path / "e.llmc")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Weights are compared only when the event is set."""
    may_go, check = threading.Event(), check_chunk

    def wait_and_check(*arguments: object) -> None:
        may_go.wait()
        check(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_check, "check_chunk", wait_and_check)
    yield may_go
    may_go.set()


def test_a_flipped_byte_anywhere_is_found_before_the_first_token(engine: Path) -> None:
    """In the middle of every weight, in its first and last byte, and in what lies between weights."""
    directory, check = start_engine(engine)
    check.wait()
    places = {
        (stored.path, at)
        for stored in directory.tensors
        for at in (stored.begin, (stored.begin + stored.end) // 2, stored.end - 1)
    }
    places |= {(stored.path, stored.path.stat().st_size - 1) for stored in directory.tensors}
    del directory, check
    for file, at in sorted(places):
        flip(file, at)
        with (
            pytest.raises(EngineFormatError, match="the file is corrupt: bytes from 0 on have XXH3"),
            load(engine, threads=1) as opened,
        ):
            opened.generate([1, 2, 3], ONE)
        flip(file, at)
    with load(engine, threads=1) as opened:
        assert len(opened.generate([1, 2, 3], ONE)[0].token_ids) == 1


def test_no_token_leaves_before_the_check_has_ended(
    engine: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, answered, wait = threading.Event(), threading.Event(), WeightCheck.wait

    def announce_and_wait(check: WeightCheck) -> None:
        waits.set()
        wait(check)

    monkeypatch.setattr(WeightCheck, "wait", announce_and_wait)
    with load(engine, threads=1) as opened:

        def ask() -> None:
            opened.generate([1, 2, 3], ONE)
            answered.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert waits.wait(timeout=60)
        assert not answered.is_set()
        held.set()
        asking.join()
        assert answered.is_set()


def test_every_step_and_every_way_to_ask_fails(engine: Path) -> None:
    directory, check = start_engine(engine)
    check.wait()
    stored = directory.tensors[0]
    del directory, check
    flip(stored.path, stored.begin)
    with load(engine, threads=1) as opened:
        for _ in range(2):
            with pytest.raises(EngineFormatError, match="corrupt"):
                opened.logits([1, 2, 3])
        with pytest.raises(EngineFormatError, match="corrupt"):
            list(opened.stream([1, 2, 3], ONE))
        with pytest.raises(EngineFormatError, match="corrupt"):
            opened.wait_until_checked()
    with load(engine, threads=1, check_weights=False) as opened:
        opened.generate([1, 2, 3], ONE)


def test_other_files_are_compared_too(engine: Path) -> None:
    flip(engine / "report" / "passes.json", 5)
    with pytest.raises(EngineFormatError, match=r"corrupt[\s\S]*passes\.json"), load(engine, threads=1) as opened:
        opened.generate([1, 2, 3], ONE)


def test_an_engine_is_closed_while_it_is_compared(engine: Path, held: threading.Event) -> None:
    load(engine, threads=1).close()
    assert not held.is_set()


def test_a_check_that_was_cancelled_ends(engine: Path, held: threading.Event) -> None:
    directory, check = start_engine(engine)
    assert isinstance(check, WeightCheck)
    check.cancel()
    assert directory.files and not held.is_set()


def test_it_begins_before_the_runtime_is_imported(draft_engine: Path) -> None:
    program = (
        "import sys\n"
        "from llmc.engine_format import start_engine\n"
        "from llmc.runtime.loading import load\n"
        "from pathlib import Path\n"
        "start_engine(Path(sys.argv[1]))[1].wait()\n"
        "print(sorted({'numpy', 'llmc.runtime.engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(draft_engine)], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
