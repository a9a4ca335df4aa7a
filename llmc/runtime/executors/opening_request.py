"""The arguments for opening an executor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.program import Program
from llmc.runtime.kv_capacity import block_count
from llmc.runtime.memory import available_bytes
from llmc.runtime.prefix_cache.snapshot_capacity import snapshot_count


class CacheRoom(NamedTuple):
    """The memory options of llmc.load for caches; None takes the default; by default no snapshots are kept."""

    kv_cache_bytes: int | None = None
    kv_memory: float | None = None
    state_cache_bytes: int | None = 0


@dataclass(frozen=True)
class OpeningRequest:
    """The request to open an engine. check: the running check of the weights; the executor releases no
    results before it succeeds. beside: programs of engines that will be opened with the same number of blocks. blocks:
    blocks in each cache group, as another engine has them; None takes the number that `room` allows."""

    directory: EngineDirectory
    threads: int
    room: CacheRoom
    check: WeightCheck | None = None
    beside: Sequence[Program] = ()
    blocks: int | None = None

    def in_host_memory(self) -> tuple[int, int]:
        """Blocks of the KV cache and snapshots of states, where they lie in this machine's memory."""
        if self.blocks is not None:
            return self.blocks, 0
        snapshots = snapshot_count(self.directory.program, self.room.state_cache_bytes, available_bytes())
        whole, room = self.directory.whole_program, self.room
        return block_count(whole, room.kv_cache_bytes, room.kv_memory, self.beside, snapshots), snapshots

    def wait_for_weights(self) -> None:
        """Wait until weights are checked, for executors that copy them first, which takes longer."""
        if self.check is not None:
            self.check.wait()
