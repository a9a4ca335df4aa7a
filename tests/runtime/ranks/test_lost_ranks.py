"""A rank that is killed, stands still or does not come up ends the engine with an error that names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmc.api.version import VERSION
from llmc.errors import LlmcError, RankError
from llmc.runtime.engine import Engine
from llmc.runtime.executors.executor import ReopeningExecutor
from llmc.runtime.loading import load
from llmc.runtime.ranks import local_ranks
from llmc.runtime.ranks.channel import SharedMemory
from llmc.runtime.ranks.greeting import Greeting
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor
from llmc.runtime.ranks.team import Member, Team, await_message
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.ranks.conftest import NewEngine, children
from tests.tiny_models import tiny_tokens

PROMPT = tiny_tokens(7)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
# Each kill once; and as often as may show what happens seldom.
often = pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=[2, 3])
def path(request: pytest.FixtureRequest, of_ranks: NewEngine) -> Path:
    return of_ranks(request.param)


@pytest.fixture
def engine(path: Path, environment: Callable[[str, str], None]) -> Iterator[Engine]:
    """Whose ranks wait for each other for a day: only that a socket closes ends a step of it sooner."""
    environment("LLMC_RANK_STALL_SECONDS", "86400")
    with load(path, threads=1) as opened:
        yield opened


def team(engine: Engine) -> Team:
    executor = engine.loop.executor
    assert isinstance(executor, RankedCppExecutor)
    return executor._team


def last(engine: Engine) -> tuple[int, str]:
    """The process of the last rank, and what its error is to say when it is killed."""
    member = team(engine)._members[-1]
    assert member.process is not None
    pid = member.process.pid
    return pid, rf"rank {member.rank} \(process {pid}\) was killed by signal 9"


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.001)


@often
def test_killed_at_start(path: Path, attempt: int) -> None:
    """As soon as its process is there."""
    before, killed = children(), []

    def kill() -> None:
        until(lambda: children() - before)
        killed.append(min(children() - before))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError) as caught:
        load(path, threads=1)
    killer.join()
    assert f"(process {killed[0]}) was killed by signal 9 before it was ready" in caught.value.problem


@often
def test_killed_while_it_loads(path: Path, attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was told what to load; later and later, so that it may have done so."""

    def killing(member: Member, seconds: float) -> Any:
        told.append(member.rank)
        if told.count(1) == 2 and member.rank == 1:
            assert member.process is not None
            killer = threading.Timer(0.003 * attempt, member.process.kill)
            killer.start()
        return await_message(member, seconds)

    told: list[int] = []
    monkeypatch.setattr(local_ranks, "await_message", killing)
    with (
        pytest.raises(RankError, match=r"rank 1 \(process \d+\) was killed by signal 9"),
        load(path, threads=1) as engine,
    ):
        while True:
            engine.generate([PROMPT], LONG)


@often
def test_killed_between_steps(engine: Engine, attempt: int) -> None:
    pid, message = last(engine)
    engine.generate([PROMPT], SamplingParams(max_tokens=2))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=message):
        engine.generate([PROMPT], LONG)
    with pytest.raises(RankError, match=message):
        engine.generate([PROMPT], LONG)


@often
def test_killed_in_a_step(engine: Engine, attempt: int) -> None:
    """While the first rank waits for it in a collective: it is stopped until that is so."""
    pid, message = last(engine)
    watched = team(engine)

    def kill() -> None:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: watched._awaited(watched._progress()))
        os.kill(pid, signal.SIGKILL)

    killer = None
    with pytest.raises(RankError, match=message):
        for count, _ in enumerate(engine.stream(PROMPT, LONG)):
            if count == 3:
                killer = threading.Thread(target=kill)
                killer.start()
    assert killer is not None
    killer.join()


@often
def test_killed_under_load(engine: Engine, attempt: int) -> None:
    """At any moment of many steps."""
    pid, message = last(engine)
    steps = engine.loop.executor

    def kill() -> None:
        until(lambda: steps._place.round > 20 + 7 * attempt)  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError, match=message):
        while True:
            engine.generate([tiny_tokens(n) for n in (33, 7, 1, 18)], LONG)
    killer.join()


def test_stopped_in_a_step(of_ranks: NewEngine, environment: Callable[[str, str], None]) -> None:
    """It lives and says nothing: the others do not wait for ever."""
    environment("LLMC_RANK_STALL_SECONDS", "1")
    with load(of_ranks(3), threads=1) as engine:
        pid, _ = last(engine)
        engine.generate([PROMPT], SamplingParams(max_tokens=2))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match=rf"rank 2 \(process {pid}\) has kept the others waiting for 1 s"):
            engine.generate([PROMPT], LONG)


def test_hangs_at_start(
    of_ranks: NewEngine, environment: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that never says anything (vllm#6370)."""
    environment("LLMC_RANK_START_SECONDS", "0.2")
    hanging = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(local_ranks, "worker_command", lambda *_: hanging)
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) did not come up within 0.2 seconds"):
        load(of_ranks(2), threads=1)


def test_ranks_that_do_not_start_again(
    of_ranks: NewEngine, environment: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine can still be closed."""
    with load(of_ranks(2), threads=1) as engine:
        executor = engine.loop.executor
        assert isinstance(executor, ReopeningExecutor)
        pid, message = last(engine)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=message):
            engine.generate([PROMPT], LONG)
        environment("LLMC_RANK_START_SECONDS", "0.2")
        hanging = [sys.executable, "-c", "import signal; signal.pause()"]
        monkeypatch.setattr(local_ranks, "worker_command", lambda *_: hanging)
        with pytest.raises(RankError, match=r"rank 1 \(process \d+\) did not come up within 0.2 seconds"):
            executor.reopen()


def test_the_first_is_killed(of_ranks: NewEngine) -> None:
    """The others end with it."""
    script = (
        "import sys; from llmc.runtime.loading import load; engine = load(sys.argv[1], threads=1); "
        "print(*(m.process.pid for m in engine.loop.executor._team._members), flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(of_ranks(3))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    others = list(map(int, first.stdout.readline().split()))
    assert len(others) == 2
    first.kill()
    first.wait()
    until(lambda: not any(map(_runs, others)))


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody has asked for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_weights_of_a_rank_that_cannot_be_read(of_ranks: NewEngine, tmp_path: Path) -> None:
    engine = tmp_path / "engine.llmc"
    engine.mkdir()
    for file in of_ranks(2).rglob("*"):
        target = engine / file.relative_to(of_ranks(2))
        if file.is_dir():
            target.mkdir(exist_ok=True)
        elif "rank1-" in file.name:
            target.write_bytes(bytes(file.stat().st_size))
        else:
            target.write_bytes(file.read_bytes())
    with pytest.raises(LlmcError, match=r"rank 1 \(process \d+\) could not open the engine"):
        load(engine, threads=1)


def test_memory_goes_with_the_last_who_has_it() -> None:
    def held() -> int:
        return Path("/proc/self/maps").read_text().count("llmc-ranks")

    before = held()
    memory = SharedMemory.create(4096)
    memory.close()
    assert held() == before + 1
    del memory
    assert held() == before


def test_other_versions_and_engines_are_refused() -> None:
    own = Greeting(VERSION, "ab" * 32, "/engines/a")
    own.check(asdict(own), "rank 1")
    with pytest.raises(RankError, match=f"rank 1 runs llmc 0.0.7, the first rank {VERSION}"):
        own.check(asdict(Greeting("0.0.7", "ab" * 32, "/engines/a")), "rank 1")
    with pytest.raises(RankError, match="manifest cdcdcdcdcdcd at /engines/b, here abababababab at /engines/a"):
        own.check(asdict(Greeting(VERSION, "cd" * 32, "/engines/b")), "rank 1")
    several: tuple[object, ...] = ({}, {"version": VERSION}, {"version": 1, "engine": "a", "path": "b"}, [], "hello")
    for nonsense in several:
        with pytest.raises(RankError, match="does not answer as a rank"):
            own.check(nonsense, "rank 1")
