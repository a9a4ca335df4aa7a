"""Run an engine of several ranks on this machine's CPU: this process is the first rank and starts the others.

The first rank schedules and samples. A step's arrays go through shared memory, a message says that they are there, and
all ranks run it at once, meeting in its collectives (codegen/cpp/kernels/ranks.h). A rank that ends is seen by its
socket: the others leave their collectives, and the step is an error that names it.
"""

from __future__ import annotations

import ctypes
import selectors
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import RankError
from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import worker_command, worker_environment
from llmc.program import Program
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.executors.cpp import ChoosingCppExecutor, open_library
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.ranks.channel import Channel, SharedMemory, put_step

START_SECONDS = 120.0
_WORKER = "llmc.runtime.ranks.worker"


@dataclass
class _Worker:
    """A rank's process. lifeline: ends it with this one."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    lifeline: Lifeline


class RankedCppExecutor(ChoosingCppExecutor):
    """As ChoosingCppExecutor, with a part of the weights and of the cache in each of several processes.

    threads: of all ranks together. Raises RankError for a rank that does not come up.
    """

    def __init__(self, engine: EngineDirectory, blocks: int, threads: int, check: WeightCheck | None = None) -> None:
        ranks = engine.program.ranks
        exchange = open_library(engine).llmc_engine_ranks_bytes
        exchange.restype = ctypes.c_int64
        self._exchange_bytes = int(exchange(ranks))
        self._memory = SharedMemory.create(self._exchange_bytes + step_bytes(engine.program))
        self._lost: str | None = None
        self._closing = threading.Event()
        own = max(1, threads // ranks)
        self._workers: list[_Worker] = []
        try:
            for rank in range(1, ranks):
                self._workers.append(_start(engine, rank, self._memory, self._exchange_bytes, blocks, own))
            for worker in self._workers:
                _await(worker)
            super().__init__(engine, blocks, own, check, ranks=rank_in(self._memory, 0, ranks))
        except BaseException:
            self._end_workers()
            raise
        self._watcher = threading.Thread(target=self._watch, name="llmc-ranks", daemon=True)
        self._watcher.start()

    def step(self, step: Step) -> Logits:
        """On all ranks. Raises RankError that names a rank which has ended; no later step works then."""
        self._tell(put_step(step, self._memory.bytes[self._exchange_bytes :]))
        logits = super().step(step)
        self._check_ranks()
        return logits

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Of every rank's layers."""
        self._tell({"do": "copy_blocks", "to": list(copies), "from": list(copies.values())})
        super().copy_blocks(copies)

    def move_slots(self, sources: Ints, destinations: Ints) -> None:
        """Of every rank's layers."""
        self._tell({"do": "move_slots", "from": sources.tolist(), "to": destinations.tolist()})
        super().move_slots(sources, destinations)

    def close(self) -> None:
        """End the other ranks, too."""
        self._end_workers()
        super().close()

    def _tell(self, message: object) -> None:
        self._check_ranks()
        for worker in self._workers:
            with suppress(OSError):  # The watcher says which rank was lost.
                worker.channel.send(message)

    def _check_ranks(self) -> None:
        if self._lost_flag():
            raise RankError(
                f"{self._lost or 'a rank has ended'}: the engine cannot go on without it",
                at="the engine's ranks",
                fix="look at why that process ended, then open the engine again",
            )

    def _lost_flag(self) -> bool:
        return bool(self._memory.bytes[:4].view(np.uint32)[0])

    def _watch(self) -> None:
        """Until a rank ends: by itself, or with the engine."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
            while not self._closing.is_set():
                for key, _ in selector.select(0.5):
                    if not self._closing.is_set():
                        self._note_lost(key.data)
                    return

    def _note_lost(self, worker: _Worker) -> None:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
        code = worker.process.returncode
        how = "has stopped answering" if code is None else f"was killed by signal {-code}" if code < 0 else "has ended"
        self._lost = f"rank {worker.rank} (process {worker.process.pid}) {how}"
        self._memory.bytes[:4].view(np.uint32)[0] = 1 + worker.rank

    def _end_workers(self) -> None:
        self._closing.set()
        self._memory.bytes[:4].view(np.uint32)[0] = 1
        for worker in self._workers:
            worker.channel.close()
            worker.lifeline.close()
        for worker in self._workers:
            try:
                worker.process.wait(5.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers = []


def step_bytes(program: Program) -> int:
    """Room for the arrays of any step."""
    limits = program.limits
    blocks = -(-limits.max_model_len // limits.block_size)
    words = 8 * limits.max_batch_tokens + 4 * limits.max_sequences + limits.max_sequences * blocks
    return 4 * (words + limits.max_logit_rows + program.hidden_width * limits.max_batch_tokens) + 4096


def rank_in(memory: SharedMemory, rank: int, ranks: int) -> LlmcRanks:
    """How a library exchanges values with other ranks' ones."""
    return LlmcRanks(rank, ranks, memory.bytes.ctypes.data, 0)


def _start(
    engine: EngineDirectory, rank: int, memory: SharedMemory, exchange_bytes: int, blocks: int, threads: int
) -> _Worker:
    own, theirs = socket.socketpair()
    lifeline = Lifeline()
    numbers = (rank, memory.descriptor, len(memory.bytes), exchange_bytes, blocks, threads, theirs.fileno())
    try:
        process = subprocess.Popen(
            worker_command(_WORKER, str(engine.path), *map(str, numbers), str(lifeline.worker_end)),
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(memory.descriptor, theirs.fileno(), lifeline.worker_end),
            process_group=0,
        )
    finally:
        lifeline.started()
        theirs.close()
    return _Worker(rank, process, Channel(own), lifeline)


def _await(worker: _Worker) -> None:
    worker.channel.socket.settimeout(START_SECONDS)
    try:
        message = worker.channel.receive()
        problem = "ended before it was ready" if message is None else message.get("problem")
    except TimeoutError:
        problem = f"did not come up within {START_SECONDS:.0f} seconds"
    except OSError as error:
        problem = f"could not be reached: {error}"
    if problem is not None:
        raise RankError(
            f"rank {worker.rank} {problem}",
            at=f"process {worker.process.pid}",
            fix="look at the machine's memory and at what else runs there, then open the engine again",
        )
    worker.channel.socket.settimeout(None)
