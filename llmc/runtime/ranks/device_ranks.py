"""Run an engine for GPUs on several ranks of one machine, one process per GPU; this process is the first.

The others are started as those of CPUs are (local_ranks.py), open their parts of the weights, and then all meet: in a
store of torch's, through which they exchange memory handles and form the library's group. Each step is sent to all
ranks, and all of them launch it; the first one chooses tokens. With executor="triton_interpreter" or "ptx" the same
happens without GPUs: the ranks' memory is shared memory, and gloo is the library.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from llmc.engine_format import EngineDirectory
from llmc.errors import LlmcError, RankError
from llmc.program import StepOutput
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.executors.executor import Chosen, Logits, SideArray
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.memory import Bytes
from llmc.runtime.ranks.channel import Channel, copy_rows, taken_choices, taken_step
from llmc.runtime.ranks.device_part import DeviceExecutor, compute_part
from llmc.runtime.ranks.local_ranks import start_ranks
from llmc.runtime.ranks.losses import Losses
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.step_rows import Compute, StepRows
from llmc.runtime.sampling.row_choice import RowChoices
from llmc.settings import settings

_Found = TypeVar("_Found")
# Connect a rank of a stage, by its number there and the number of the stage's ranks, over a store, with memory that
# they share. Raises RankError.
Meet = Callable[[int, int, Store, Bytes], DevicePlace]


class RankedDeviceExecutor(Losses):
    """The first rank's executor, with a team of ranks that follow it. Raises RankError if a rank does not start or
    connect, and then closes the executor. blocks: number of blocks of each rank's cache. executor: the executor of the
    other ranks; None takes the device's, or the interpreter if the environment selects it.

    The team can be started again after a rank was lost; the first rank keeps its weights then.
    """

    def __init__(
        self,
        engine: EngineDirectory,
        own: DeviceExecutor,
        blocks: int,
        meet: Meet,
        shared_bytes: int,
        executor: str | None = None,
    ) -> None:
        self.ranks = engine.program.layout.ranks
        self.blocks, self._own = blocks, own
        self._directory, self._meet = engine, meet
        self._plan = RankPlan(0, self.ranks, blocks, 1, shared_bytes, executor)
        self._place: DevicePlace | None = None
        # Held while the team and its place change, and by the thread that reports the loss of a rank.
        self._changing = threading.Lock()
        try:
            self._gather()
        except BaseException:
            own.close()
            raise

    def step(self, step: Step) -> Logits:
        """Run a step on all ranks. Raises RankError that names one that has ended; no later step works then."""
        return self._with_all(step, lambda: self._own.step(step))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """A step on all ranks; the first one chooses."""
        return self._with_all(step, lambda: self._own.choose(step, wanted, choices))

    def logits(self, first: int, count: int) -> Logits:
        """The logits of the first rank, which has all of them."""
        return self._own.logits(first, count)

    def side_output(self, name: str) -> SideArray:
        return self._own.side_output(name)

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        """Apply this to every rank's layers."""
        self._team.tell({"do": "copy_blocks", "to": list(copies), "from": list(copies.values()), "group": group})
        self._own.copy_blocks(copies, group)

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        """Apply this to every rank's layers."""
        self._team.tell({"do": "move_slots", "from": sources.tolist(), "to": destinations.tolist(), "group": group})
        self._own.move_slots(sources, destinations, group)

    def reopen(self) -> None:
        """Start the other ranks again after one was lost. Raises RankError."""
        self._team.close()
        self._part()
        self._gather()

    def close(self) -> None:
        """Close the executor, and end the other ranks."""
        self._team.close()
        self._part()
        self._own.close()

    def _gather(self) -> None:
        """Start the other ranks and connect to them."""
        team, place = start_ranks(self._directory, self._plan, self._tell_lost), None
        try:
            if self._directory.program.ranks > 1:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience())
                team.tell({"do": "meet", "port": store.port})
                place = _met(self._meet, store, team.rows)
                self._own.join(place)
        except BaseException:
            team.close()
            if place is not None:
                place.part()
            raise
        with self._changing:
            self._team, self._place = team, place

    def _part(self) -> None:
        with self._changing:
            if self._place is not None:
                self._place.part()
                self._place = None

    def _with_all(self, step: Step, run: Callable[[], _Found]) -> _Found:
        self._team.tell_step(step)
        return self._checked(run)

    def _checked(self, run: Callable[[], _Found]) -> _Found:
        """Run this rank's part of a step. Raises RankError if a rank was lost meanwhile."""
        try:
            result = run()
        except RuntimeError:  # The library's, which lost a rank.
            self._team.fail()
            self._team.check()
            raise
        self._team.check()
        return result

    def _tell_lost(self) -> None:
        with self._changing:
            # A team that was closed meanwhile may report its loss late.
            if self._place is not None and self._team.is_lost.is_set():
                self._place.leave()
        super()._tell_lost()


def serve_device_rank(open_own: Callable[[], DeviceExecutor], meet: Meet, channel: Channel, rows: StepRows) -> None:
    """Run as another rank: open the executor, and execute messages until the other end is closed.

    Args:
        open_own: Opens the rank's executor.
        meet: Connects it to the other ranks of its stage.
        channel: The connection to the first rank, which receives errors that occur after the executor was opened.
        rows: The rank's exchange of rows with its neighbours.

    Raises:
        LlmcError: The executor could not be opened.
    """
    executor = open_own()
    channel.send({})
    try:
        _serve(executor, meet, channel, rows)
    except LlmcError as error:
        # An error after another rank was lost is a consequence of that.
        kind = "gave_up" if rows.memory.lost.any() else "problem"
        with suppress(OSError):
            channel.send({kind: f"has failed: {error.problem}"})


def _serve(executor: DeviceExecutor, meet: Meet, channel: Channel, rows: StepRows) -> None:
    """Connect to the ranks of the stage if there are any, and execute messages. Raises LlmcError."""
    if rows.memory.layout.ranks.tensor == 1:
        return _follow(executor, channel, rows)
    message = channel.receive()
    if message is None:
        return
    place = _met(meet, TCPStore("127.0.0.1", message["port"], timeout=patience()), rows)
    try:
        executor.join(place)
        _follow(executor, channel, rows)
    finally:
        place.part()


def _follow(executor: DeviceExecutor, channel: Channel, rows: StepRows) -> None:
    memory, layout = rows.memory, rows.memory.layout.ranks
    is_last = layout.stage_of(rows.rank) == layout.pipeline - 1
    while (message := channel.receive()) is not None and not memory.lost.any():
        if message["do"] == "step":
            arrays = memory.step(message["number"])
            step, choices = taken_step(message, arrays), taken_choices(message, arrays) if is_last else None
            part: Compute = partial(compute_part, executor, StepOutput(message["wanted"]), choices)
            rows.run(part, step, message["number"])
        elif message["do"] == "logits":
            rows.give_logits(executor.logits, message["first"], message["count"], message["number"])
        else:
            copy_rows(message, executor)


def _met(meet: Meet, store: Store, rows: StepRows) -> DevicePlace:
    """Connect to the other ranks of this rank's stage. The stages share the server of the store."""
    layout = rows.memory.layout.ranks
    stage, rank = layout.stage_of(rows.rank), layout.tensor_rank_of(rows.rank)
    try:
        return meet(rank, layout.tensor, PrefixStore(f"stage{stage}", store), rows.memory.exchange(stage))
    except RuntimeError as error:  # torch's errors of stores and groups are
        raise RankError(
            f"the ranks could not meet: {' '.join(str(error).split()):.300}",
            at="the engine's ranks",
            fix="check that each rank's GPU is free and can reach the others: nvidia-smi topo -m",
        ) from None


def patience() -> timedelta:
    """Return the time for which ranks wait for each other while they connect."""
    return timedelta(seconds=settings().rank_start_seconds)


def part_from_group() -> None:
    """Leave torch's process group, so that this process can join another one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def tables_of(own: int, addresses: list[int]) -> Tensor:
    """The address table of a rank as a CPU tensor: its own entry, then every rank's address."""
    return torch.tensor([own, *addresses], dtype=torch.int64)
