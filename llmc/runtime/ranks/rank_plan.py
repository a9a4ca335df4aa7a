"""What the first rank tells each other one when it has come up: who it is, and how much memory and threads it has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmc.program import Program
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.ranks.channel import SharedMemory


@dataclass(frozen=True)
class RankPlan:
    """blocks: of each rank's cache. threads: of its steps, on the first rank's machine. exchange_bytes: of the memory
    that collectives use, before that for a step's arrays."""

    rank: int
    ranks: int
    blocks: int
    threads: int
    exchange_bytes: int

    def message(self) -> dict[str, Any]:
        """To be sent."""
        return asdict(self)

    def place(self, memory: SharedMemory) -> LlmcRanks:
        """How the rank's library exchanges values with the others' through memory that they share."""
        return LlmcRanks(self.rank, self.ranks, memory.bytes.ctypes.data, 0)


def step_bytes(program: Program) -> int:
    """Room for the arrays of any step."""
    limits = program.limits
    blocks = -(-limits.max_model_len // limits.block_size)
    words = 8 * limits.max_batch_tokens + 4 * limits.max_sequences + limits.max_sequences * blocks
    return 4 * (words + limits.max_logit_rows + program.hidden_width * limits.max_batch_tokens) + 4096
