"""The executor: the interface between the runtime and compiled or interpreted engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llmc.errors import RankError
from llmc.program import StepOutput
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.memory import Bytes
from llmc.runtime.sampling.row_choice import RowChoices

Logits = npt.NDArray[np.float32]
# Floating-point numbers as float32, whole ones as they are.
SideArray = npt.NDArray[np.float32 | np.int32]


@dataclass(frozen=True)
class Chosen:
    """The token of each wanted row, a score that is finite for usable logits, and whether the choice could be made.

    [L] each; overwritten by the next step. A row that is not covered needs its logits.
    """

    tokens: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    covered: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LaunchTime:
    """When a launch of the program ran within its step. launch: its index; start, end: seconds since the step began."""

    launch: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the launch in seconds."""
        return self.end - self.start


class Executor(Protocol):
    """An engine's weights, KV cache and code, ready to run."""

    def step(self, step: Step) -> Logits:
        """Run one step: fills the cache's slots, returns the wanted rows' logits [L, vocabulary], fp32.

        The array may be overwritten by the next step.
        """

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        """Copy blocks of a group of caches, {destination: source}, before the next step; sources are read first."""

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        """Copy rows of a group of caches in its every layer, exactly, before the next step; [n] slots as in
        Step.slot_mapping.

        All sources are read first.
        """
        ...

    def close(self) -> None:
        """Free everything; no step may follow."""


@runtime_checkable
class ChoosingExecutor(Executor, Protocol):
    """An executor that can choose tokens where the logits are, so that they need not travel."""

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """Run one step like `step`, but return tokens. wanted: the minimum output that the choices need, not LOGITS."""

    def logits(self, first: int, count: int) -> Logits:
        """Rows of the last step's logits, unless that step computed BEST only; overwritten by the next call. Ranks that
        all choose leave none, unless a score was not finite (RowChoices.reads_logits)."""


@runtime_checkable
class QueueingExecutor(ChoosingExecutor, Protocol):
    """An executor that can queue a step before the tokens of the step before it are read."""

    def queue(
        self, step: Step, wanted: StepOutput, choices: RowChoices, *, is_fed: bool = False
    ) -> Callable[[], Chosen]:
        """Begin a step as `choose` runs it. At most two steps are under way.

        Args:
            step: It may be overwritten as soon as this returns.
            wanted: The minimum output that the choices need, not LOGITS.
            choices: How its tokens are chosen.
            is_fed: Whether its input ids are the tokens of the step queued before it, row by row. Both are decodes.

        Returns:
            A function that waits for the tokens. They are overwritten by the step after the next one.
        """


@runtime_checkable
class WarmingExecutor(Executor, Protocol):
    """An executor that can prepare for steps before the first request."""

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Prepare for steps; yields how many of them are done, and of how many. No other step may run meanwhile."""


@runtime_checkable
class SideOutputExecutor(Executor, Protocol):
    """An executor with side outputs of a step (program.side_outputs)."""

    def side_output(self, name: str) -> SideArray:
        """[T or L, *shape] of the last step, which requested it (Step.sides); overwritten by the next step."""


@runtime_checkable
class AdaptedExecutor(Executor, Protocol):
    """An executor of an engine that takes adapters."""

    def put_adapter(self, slot: int, adapter: PlacedAdapter) -> None:
        """Write an adapter into a slot of the pools, replacing its contents, before the next step."""


@runtime_checkable
class StateExecutor(Executor, Protocol):
    """An executor that keeps the states of recurrent layers (program.states), in one slot per sequence
    (max_sequences)."""

    def copy_states(self, source: int, destination: int) -> None:
        """Copy a slot's states, as the last step left them, to another slot before the next step."""


@runtime_checkable
class SnapshotExecutor(StateExecutor, Protocol):
    """An executor with further slots of states after those of max_sequences; no step reads them."""

    @property
    def snapshots(self) -> int:
        """The number of these slots."""


class BlockCaches(Protocol):
    """Caches whose blocks can be copied to the host and back, bit for bit."""

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Start to copy blocks of a group of caches to the host, as the last step left them; later steps do not affect
        the copy.

        The returned function, callable from any thread, waits for the copy and returns it: [len(blocks), bytes per
        block].
        """

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        """Write such rows into blocks before the next step. The rows may be overwritten after the call."""


@runtime_checkable
class OffloadingExecutor(Executor, BlockCaches, Protocol):
    """An executor whose caches are BlockCaches."""


@runtime_checkable
class CompactingExecutor(Executor, Protocol):
    """An executor of an engine whose cache policy scores rows."""

    def compact(self, compaction: Ints) -> None:
        """Choose and move a request's rows in every layer, before the next step: llmc/ops/compact_kv.py."""


@runtime_checkable
class ReopeningExecutor(Executor, Protocol):
    """An executor of several processes, which can be started again when one of them is lost."""

    @property
    def ranks(self) -> int:
        """The number of processes."""

    @property
    def lost(self) -> RankError | None:
        """The error that every step raises after a rank was lost; None otherwise."""

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Register a function that another thread calls when a rank is lost; `lost` then names the rank."""

    def reopen(self) -> None:
        """Start all ranks again after a loss, with empty caches; steps run again. Raises RankError."""


@runtime_checkable
class DrawingExecutor(Executor, Protocol):
    """An executor with a kernel that draws from logits that the host has changed, such as by a grammar."""

    def draw(self, logits: Logits, choices: RowChoices) -> npt.NDArray[np.int32]:
        """A token for each row: [rows]. logits: [rows, vocabulary], finite somewhere."""


@runtime_checkable
class TimedExecutor(Executor, Protocol):
    """An executor that can measure the time of each launch of a step."""

    def step_timed(self, step: Step) -> tuple[LaunchTime, ...]:
        """Run one step; the times of its launches in order. Launches that the step does not have are left out."""
