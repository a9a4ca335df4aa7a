"""The layout of the memory that the ranks of a machine share, or that each rank has.

It begins with the memory of each stage's collectives, whose first word is set once a rank is lost, and the number of
steps that each rank has finished. Then follow, for each step in flight, its arrays, the rows that each rank hands to
the same rank of the next stage, and the logits. Steps are numbered and use one place per stage cyclically.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.engine_format import EngineDirectory
from llmc.program import CHOICE_INPUTS, Program, RankLayout
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.memory import Bytes

_ALIGNMENT = 64


@dataclass(frozen=True)
class MemoryLayout:
    """Sizes in bytes. exchange: bytes of a stage's collectives. step: maximum bytes of a step's arrays. widths: numbers
    of a row that each stage except the first takes over. tokens: maximum tokens of a step. logits: rows and columns,
    where stages give any."""

    ranks: RankLayout
    exchange: int
    step: int
    widths: tuple[int, ...]
    tokens: int
    logits: tuple[int, int]

    @staticmethod
    def of(engine: EngineDirectory, exchange: int) -> "MemoryLayout":
        """The layout for all stages of an engine."""
        stages = [stage.program for stage in engine.stages]
        first = stages[0]
        limits, widths = first.limits, tuple(program.hidden_width for program in stages[1:])
        logits = (limits.max_logit_rows, first.vocab_size) if widths else (0, 0)
        return MemoryLayout(first.layout, exchange, _step_bytes(first), widths, limits.max_batch_tokens, logits)

    @property
    def slot(self) -> int:
        """Bytes of one step."""
        rows = self.ranks.tensor * sum(map(self._rows, self.widths))
        return self.step + rows + _aligned(4 * self.logits[0] * self.logits[1])

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return self.begin(0) + self.ranks.pipeline * self.slot

    def begin(self, number: int) -> int:
        """The place of the arrays of a step, by its number."""
        ended = self.ranks.ranks * _ALIGNMENT
        return self.ranks.pipeline * self.exchange + ended + number % self.ranks.pipeline * self.slot

    def rows(self, number: int, stage: int, tensor_rank: int) -> tuple[int, int]:
        """The place of the rows that a rank of a stage receives, and its size in bytes."""
        own = self._rows(self.widths[stage - 1])
        before = self.ranks.tensor * sum(map(self._rows, self.widths[: stage - 1]))
        return self.begin(number) + self.step + before + tensor_rank * own, own

    def _rows(self, width: int) -> int:
        return _aligned(4 * width * self.tokens)


@dataclass(frozen=True)
class RankMemory:
    """Such memory."""

    bytes: Bytes
    layout: MemoryLayout

    @property
    def lost(self) -> npt.NDArray[np.uint32]:
        """The word of each stage that becomes nonzero once a rank is lost; the others then leave their collectives."""
        words = self.bytes.view(np.uint32)
        return words[: self.layout.ranks.pipeline * self.layout.exchange // 4 : self.layout.exchange // 4]

    def rounds(self, rank: int) -> npt.NDArray[np.uint32]:
        """The word that counts the exchanges that a rank has reached."""
        ranks = self.layout.ranks
        line = ranks.stage_of(rank) * self.layout.exchange + (1 + ranks.tensor_rank_of(rank)) * _ALIGNMENT
        return self.bytes[line : line + 4].view(np.uint32)

    def ended(self, rank: int) -> npt.NDArray[np.uint64]:
        """The word with the number of steps that a rank has finished."""
        line = self.layout.ranks.pipeline * self.layout.exchange + rank * _ALIGNMENT
        return self.bytes[line : line + 8].view(np.uint64)

    def exchange(self, stage: int) -> Bytes:
        """The memory of a stage's collectives."""
        return self.bytes[stage * self.layout.exchange : (stage + 1) * self.layout.exchange]

    def place(self, rank: int) -> LlmcRanks:
        """Return the places through which a rank's library exchanges values with those of its stage."""
        ranks = self.layout.ranks
        address = self.bytes.ctypes.data + ranks.stage_of(rank) * self.layout.exchange
        return LlmcRanks(ranks.tensor_rank_of(rank), ranks.tensor, address, 0)

    def step(self, number: int) -> Bytes:
        """Room for the arrays of a step."""
        begin = self.layout.begin(number)
        return self.bytes[begin : begin + self.layout.step]

    def rows(self, number: int, rank: int, tokens: int) -> npt.NDArray[np.float32]:
        """[tokens, width]: what a rank of a later stage takes over."""
        stage = self.layout.ranks.stage_of(rank)
        begin, _ = self.layout.rows(number, stage, self.layout.ranks.tensor_rank_of(rank))
        width = self.layout.widths[stage - 1]
        return self.bytes[begin : begin + 4 * tokens * width].view(np.float32).reshape(tokens, width)

    def logits(self, number: int, rows: int) -> npt.NDArray[np.float32]:
        """[rows, vocabulary]: what the last stage gives the first rank."""
        end = self.layout.begin(number) + self.layout.slot
        most, columns = self.layout.logits
        begin = end - _aligned(4 * most * columns)
        return self.bytes[begin : begin + 4 * rows * columns].view(np.float32).reshape(rows, columns)

    def taken(self, number: int, rank: int, nbytes: int) -> Bytes:
        """The first bytes of a rank's incoming rows; for the first rank, of the logits."""
        first = self.rows(number, rank, 1) if rank else self.logits(number, 1)
        begin = first.ctypes.data - self.bytes.ctypes.data
        return self.bytes[begin : begin + nbytes]


def _step_bytes(program: Program) -> int:
    limits = program.limits
    blocks = -(-limits.max_model_len // limits.block_size)
    words = 8 * limits.max_batch_tokens + 4 * limits.max_sequences + limits.max_sequences * blocks
    words += len(program.policies) * (limits.max_batch_tokens + limits.max_sequences * (blocks + 1))
    rows = (1 + len(CHOICE_INPUTS)) * limits.max_logit_rows
    return _aligned(4 * (words + rows + program.hidden_width * limits.max_batch_tokens) + 4096)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
