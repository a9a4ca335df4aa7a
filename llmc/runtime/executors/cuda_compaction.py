"""Run the launches of a step with a compaction on a device, between two steps (llmc/ops/compact_kv.py)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from llmc.program import COMPACTION, COMPACTION_HEADER, Program, StepOutput
from llmc.program.compactor import LONGEST_CHUNK
from llmc.program.scored_compression import MOST_QUERIES
from llmc.runtime.device.inputs import NO_STEP
from llmc.runtime.device.program import PlannedCall, plan_calls
from llmc.runtime.executors.cuda_launches import CudaLaunches
from llmc.runtime.loop.step import Ints

_Addresses = Mapping[tuple[str, str], int]


class CudaCompaction:
    """A program's launches, prepared once, and memory on the device for the numbers of a compaction.

    addresses: where memory starts, as CudaLaunches takes it. launches: makes CudaLaunches of calls and addresses.
    allocate: returns a number of bytes of the device, for a purpose.
    """

    def __init__(
        self,
        program: Program,
        addresses: _Addresses,
        launches: Callable[[Sequence[PlannedCall], _Addresses], CudaLaunches],
        allocate: Callable[[int, str], Tensor],
    ) -> None:
        calls, limits = plan_calls(program, compacts=True), program.limits
        # The header, the blocks of rows and of kept rows, and the slots of queries.
        slots = max(MOST_QUERIES, LONGEST_CHUNK)
        count = COMPACTION_HEADER + 2 * limits.blocks_for(limits.max_model_len) + slots if calls else 0
        numbers = allocate(4 * count, "the numbers of a compaction")
        self.numbers = numbers[: 4 * count].view(torch.int32)
        self._launches = launches(calls, {**addresses, ("input", COMPACTION): numbers.data_ptr()})

    def run(self, compaction: Ints, stream: int) -> None:
        """Queue them on `stream`, which must be torch's current one. The numbers are copied before this returns."""
        # A copy comes first: a launch may begin before a kernel in front of it has ended.
        self.numbers[: len(compaction)].copy_(torch.from_numpy(compaction))
        prepared = self._launches.prepare(NO_STEP, StepOutput.LOGITS, ())
        self._launches.queue(prepared, NO_STEP, stream)
