"""The other ranks as the first sees them: it sends them their work, and notices when one is lost or stuck."""

import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmc.errors import RankError
from llmc.processes.lifeline import Lifeline
from llmc.program import StepOutput
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.channel import Channel, SharedMemory, put_step
from llmc.runtime.ranks.rank_memory import RankMemory
from llmc.runtime.ranks.step_rows import StepRows
from llmc.runtime.sampling.row_choice import RowChoices
from llmc.settings import settings

_TICK_SECONDS = 0.25
_END_SECONDS = 5.0
# How long one waits for a rank to be seen ending after the collectives broke off.
_BLAME_SECONDS = 2.0


@dataclass
class Member:
    """Another rank. name: what errors call it. process, lifeline: the process and lifeline of a rank that this process
    has started. shares_memory: steps need not be sent to it."""

    rank: int
    name: str
    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    lifeline: Lifeline | None = None
    shares_memory: bool = True

    def end_in_words(self) -> str:
        """Return how the process ended, as far as this process can know."""
        if self.process is None:
            return "has closed its connection"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return "has stopped answering"
        return f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"


class Team:
    """Every rank but the first, all of them ready. It is watched from now on.

    tell_lost: called by a thread once a rank is lost. place: the first rank's place in its library's collectives.
    memory: shared by all ranks, or this rank's own, made from `shared`. Once a rank is lost, a flag in it makes all
    ranks that share it leave their collectives. rows: the neighbours with which the first rank exchanges rows, if there
    are stages. lost: the lost rank; None also if ranks lost each other without one that ended. part: called at the end;
    ends the threads of ranks that share no memory.
    """

    def __init__(
        self,
        members: Sequence[Member],
        shared: SharedMemory,
        memory: RankMemory,
        place: LlmcRanks,
        rows: StepRows,
        tell_lost: Callable[[], None],
        part: Callable[[], None] = lambda: None,
    ) -> None:
        self._part = part
        self.is_lost = threading.Event()
        self._tell_lost = tell_lost
        self.place = place
        self.rows = rows
        self.memory = memory
        self.lost: Member | None = None
        self._reason = "a rank has stopped answering"
        self._members = members
        self._shared = shared
        self._rounds = [memory.rounds(rank) for rank in range(1 + len(members))]
        self._closing = threading.Event()
        # Here, because it may be closed again before the thread begins.
        self._selector = selectors.DefaultSelector()
        for member in members:
            self._selector.register(member.channel.socket, selectors.EVENT_READ, member)
        threading.Thread(target=self._watch, name="llmc-ranks", daemon=True).start()

    def tell(self, message: object) -> None:
        """Send a message to all ranks. Raises RankError if one was lost."""
        self.check()
        for member in self._members:
            with suppress(OSError):  # The watcher reports which rank was lost.
                member.channel.send(message)

    def tell_step(
        self, step: Step, number: int = 0, choices: RowChoices | None = None, wanted: StepOutput = StepOutput.LOGITS
    ) -> None:
        """Send a step to all ranks, which copy its arrays before they begin. choices: how all ranks, or those of the
        last stage, choose its tokens. wanted: the result that the last stage of GPUs computes. Raises RankError as
        `tell`."""
        self.check()
        arrays = self.memory.step(number)
        message = {**put_step(step, arrays, choices), "number": number, "wanted": wanted.value}
        data = arrays[: message["nbytes"]].data
        for member in self._members:
            with suppress(OSError):
                member.channel.send(message, b"" if member.shares_memory else data)

    def check(self) -> None:
        """Raise RankError that names a lost rank."""
        if self.memory.lost[0]:
            self.is_lost.wait(_BLAME_SECONDS + 2 * _TICK_SECONDS + 1.0)
            raise self.error()

    def error(self) -> RankError:
        """The error that names the lost rank and the reason."""
        return RankError(
            f"{self._reason}: the engine cannot continue without it",
            at="the engine's ranks",
            fix="find the cause, then open the engine again",
            rank=None if self.lost is None else self.lost.rank,
        )

    def behind(self, number: int) -> Member | None:
        """The rank for which others of its stage wait, else the first that has not ended the step of that number, of
        those that can be seen."""
        awaited = self._awaited(self._progress())
        if awaited is not None:
            return awaited
        seen = [member for member in self._members if member.shares_memory]
        return next((member for member in seen if int(self.memory.ended(member.rank)[0]) <= number), None)

    def lose(self, member: Member | None, how: str) -> None:
        """Mark a rank as lost. how: what happened to it, for the error."""
        if member is not None:
            self._reason = f"{member.name} {how}"
            if member.process is not None:
                member.process.kill()  # A stuck rank would not end by itself.
        self.lost = member
        self.memory.lost[:] = 1
        self.is_lost.set()
        self._tell_lost()

    def fail(self) -> None:
        """A collective of the first rank was interrupted: find the rank that caused it."""
        self.memory.lost[:] = 1

    def close(self) -> None:
        """End them all; none that this process started is left when this comes back. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.memory.lost[:] = 1
        self.rows.close()
        end(self._members)
        self._part()
        self._shared.close()

    def _watch(self) -> None:
        """Watch the ranks until one is lost or the engine is closed.

        Time is counted in iterations of this loop, so that a process that was stopped does not suspect its ranks
        afterwards.
        """
        patience, blame = _ticks(settings().rank_stall_seconds), _ticks(_BLAME_SECONDS)
        waited = failed = 0
        before = self._progress()
        silent = list(self._members)
        with self._selector as selector:
            while not self._closing.is_set():
                for key, _ in selector.select(_TICK_SECONDS):
                    if self._closing.is_set():
                        return
                    message = _last_message(key.data)
                    if message is None:
                        return self.lose(key.data, key.data.end_in_words())
                    if "problem" in message:
                        return self.lose(key.data, message["problem"])
                    # It gave up, because it has lost the others.
                    selector.unregister(key.fileobj)
                    silent.remove(key.data)
                    self.fail()
                failed += bool(self.memory.lost[0])
                if failed > blame:
                    return self.lose(silent[0] if silent else None, "has stopped answering")
                now = self._progress()
                waited = waited + 1 if now == before and self._awaited(now) is not None else 0
                before = now
                if waited >= patience:
                    return self.lose(
                        self._awaited(now), f"has kept the others waiting for {_TICK_SECONDS * waited:g} s"
                    )

    def _progress(self) -> list[int]:
        """Rounds of each rank, as it counts them; the counts of ranks that do not share the memory do not change."""
        return [int(word[0]) for word in self._rounds]

    def _awaited(self, progress: list[int]) -> Member | None:
        """The rank for which another of its stage waits in a collective."""
        layout = self.memory.layout.ranks

        def behind(member: Member) -> int:
            first = layout.rank_of(layout.stage_of(member.rank), 0)
            return max(
                (progress[rank] - progress[member.rank] + 2**31) % 2**32 - 2**31
                for rank in range(first, first + layout.tensor)
            )

        late = [member for member in self._members if member.shares_memory and behind(member) > 0]
        return max(late, key=behind, default=None)


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / _TICK_SECONDS))


def _last_message(member: Member) -> Any:
    """Return a rank's report, with `problem` for its own error, or `gave_up` if it has lost others; None if it has
    ended without a report."""
    try:
        return member.channel.receive()
    except OSError:
        return None


def end(members: Sequence[Member]) -> None:
    """End processes, politely and, after _END_SECONDS for all of them, by a signal; and let connections go."""
    for member in members:
        member.channel.close()
        if member.lifeline is not None:
            member.lifeline.close()
    deadline = time.monotonic() + _END_SECONDS
    for member in members:
        if member.process is not None:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()


def await_message(member: Member, seconds: float) -> Any:
    """The message of a starting rank. Raises RankError with its name."""
    member.channel.socket.settimeout(seconds)
    try:
        message = member.channel.receive()
        problem = f"{member.end_in_words()} before it was ready" if message is None else message.get("problem")
    except TimeoutError:
        problem = f"did not come up within {seconds:g} seconds"
        if member.process is not None:
            member.process.kill()  # It may do nothing any more, and so not end by itself.
    except OSError:
        problem = f"{member.end_in_words()} before it was ready"
    if problem is not None:
        raise RankError(
            f"{member.name} {problem}",
            at="the engine's ranks",
            fix="check the machine's memory and its other processes, then open the engine again; if starting "
            "takes longer, set LLMC_RANK_START_SECONDS",
        )
    member.channel.socket.settimeout(None)
    return message
