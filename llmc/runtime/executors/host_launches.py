"""Run a GPU program's launches on tensors of the CPU: what executors share that have no GPU.

How a kernel itself is run is theirs: interpreted from its source, or executed as it was compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import CHOICE_OUTPUTS, COMPACTION, Program, StepOutput, library_functions
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.slot_views import move_slots, slot_views
from llmc.program.step_result import largest_result, result_rows
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.device.adapter_tensors import adapter_tensors, with_adapters
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.device.inputs import NO_STEP, StepShape
from llmc.runtime.device.library_only import library_only
from llmc.runtime.device.program import ARENA, RANKS, PlannedCall, Pointer, calls_of_step, plan_calls
from llmc.runtime.executors.block_copies import read_blocks, write_blocks
from llmc.runtime.executors.executor import Chosen, LaunchTime, Logits, SideArray
from llmc.runtime.executors.side_outputs import SideOutputs
from llmc.runtime.executors.state_memory import copy_slot
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.memory import Bytes
from llmc.runtime.sampling.row_choice import RowChoices


class HostLaunches(ABC):
    """A program with weights and a KV cache of `blocks` blocks, in the CPU's memory.

    weights: by slot name, as the program lays them out. snapshots: how many of states there may be. launched: the
    program whose launches run.
    """

    def __init__(self, program: Program, weights: Mapping[str, Tensor], blocks: int, snapshots: int = 0) -> None:
        self.program, self.limits = program, program.limits
        limits = program.limits
        self._blocks, self.snapshots = program.group_blocks(blocks), snapshots
        self.launched = program
        self._calls, self._compacting = plan_calls(program), plan_calls(program, compacts=True)
        self._sides = SideOutputs(program)
        arena_bytes = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
        self._logits = torch.zeros(largest_result(program))
        self._memory: dict[tuple[str, str], Tensor] = {
            (ARENA, ""): torch.zeros(arena_bytes, dtype=torch.uint8),
            ("output", "logits"): self._logits,
            (ARRIVALS.space, ARRIVALS.name): torch.zeros(MOST_COUNTERS, dtype=torch.int32),
        }
        for name, dtype in CHOICE_OUTPUTS.items():
            self._memory["output", name] = torch.zeros(limits.max_logit_rows, dtype=TORCH_DTYPES[dtype])
        for name, weight in weights.items():
            self._memory["weight", name] = weight.reshape(-1)
        self._pools = adapter_tensors(program, self._add_pool)
        for name, nbytes in program.memories(blocks).items():
            self._memory["cache", name] = torch.zeros(nbytes, dtype=torch.uint8)
        for name, state in program.state_names().items():
            # NaNs, so that a read of a slot that no step has written shows.
            nbytes = (limits.max_sequences + snapshots) * state.nbytes
            self._memory["state", name] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def step(self, step: Step) -> Logits:
        """The wanted rows' logits, or the rows for the next stage."""
        self.launch_all(step, StepOutput.LOGITS)
        return self.logits(0, result_rows(self.program, len(step.input_ids), len(step.logit_rows)))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """The wanted rows' tokens."""
        for name, values in choices.arrays().items():
            self._memory["input", name] = torch.from_numpy(values.copy())
        self._memory["output", "covered"].fill_(1)
        self.launch_all(step, wanted)
        rows = len(step.logit_rows)
        tokens, scores, covered = (self._memory["output", name][:rows].numpy() for name in CHOICE_OUTPUTS)
        return Chosen(tokens, scores, covered.astype(np.bool_))

    def logits(self, first: int, count: int) -> Logits:
        logits: Logits = self._logits[first : first + count].numpy()
        return logits

    def side_output(self, name: str) -> SideArray:
        return self._sides.array(name, self._memory[ARENA, ""].numpy()[self._sides.place(name)])

    def step_timed(self, step: Step) -> tuple[LaunchTime, ...]:
        """Run a step as `step` does, and return the time of each launch on this machine, which says nothing about a
        GPU."""
        return self.launch_all(step, StepOutput.LOGITS)

    def join(self, place: DevicePlace) -> None:
        """Connect to the other ranks' memory."""
        self._memory[RANKS] = place.table
        self.launched = self.program if place.has_memory else library_only(self.program)
        self._calls = plan_calls(self.launched)

    def follow(self, step: Step) -> None:
        """Run a step whose results are not needed on this rank."""
        self.launch_all(step, StepOutput.LOGITS)

    def put_adapter(self, slot: int, adapter: PlacedAdapter) -> None:
        assert self._pools is not None, "the engine takes no adapters"
        self._pools.put(slot, adapter)

    def _add_pool(self, name: str, nbytes: int) -> Tensor:
        return self._memory.setdefault(("adapter", name), torch.zeros(nbytes, dtype=torch.uint8))

    def launch_all(self, step: Step, wanted: StepOutput) -> tuple[LaunchTime, ...]:
        """Run every launch of the step in order, and return their times. Buffers start as NaNs, so that reading a value
        that the step did not write is visible. wanted: what the caller needs of the step, which decides the
        launches."""
        step = (step if self._pools is None else with_adapters(step)).for_groups(self._blocks[1:])
        self._forget()
        shape = StepShape.of(step)
        for name, values in step.inputs():
            self._memory["input", name] = torch.from_numpy(values.copy()).reshape(-1)
        self._sides.note_step(shape.tokens, shape.logit_rows)
        begin, times = perf_counter(), []
        for call, grid in calls_of_step(self._calls, shape.counts(), wanted, step.sides):
            start = perf_counter() - begin
            self._run(call, grid, shape.counts())
            times.append(LaunchTime(call.index, start, perf_counter() - begin))
        return tuple(times)

    def compact(self, compaction: Ints) -> None:
        """Run the launches of a step with a compaction."""
        self._forget()
        self._memory["input", COMPACTION] = torch.from_numpy(compaction.copy())
        counts = NO_STEP.counts()
        for call, grid in calls_of_step(self._compacting, counts, StepOutput.LOGITS):
            self._run(call, grid, counts)

    def _forget(self) -> None:
        """Begin a step without the activations of the last one."""
        self._memory[ARENA, ""].fill_(0xFF)
        self._logits.fill_(float("nan"))

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        for name in self.program.caches_of(group):
            blocks = self._memory["cache", name].view(self._blocks[group], -1)
            blocks[list(copies)] = blocks[list(copies.values())]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        caches = [self._memory["cache", name] for name in self.program.caches_of(group)]
        indices = torch.from_numpy(sources).long(), torch.from_numpy(destinations).long()
        move_slots(slot_views(self.program, caches, group), *indices)

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Copy the blocks at once; the function that is returned gives the copy."""
        copied = read_blocks(self._whole_blocks(group), blocks)
        return lambda: copied

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        write_blocks(self._whole_blocks(group), blocks, contents)

    def _whole_blocks(self, group: int) -> list[Bytes]:
        names = self.program.caches_of(group)
        return [self._memory["cache", name].view(self._blocks[group], -1).numpy() for name in names]

    def copy_states(self, source: int, destination: int) -> None:
        """Copy a slot of every state."""
        states = (self._memory["state", name] for name in self.program.state_names())
        copy_slot(self.program, states, source, destination)

    def close(self) -> None:
        """Drop the memory."""
        self._memory.clear()

    def _run(self, call: PlannedCall, grid: tuple[int, int, int], counts: Mapping[str, int]) -> None:
        if call.kernel.is_library:
            self.run_library(call, counts)
        else:
            self.run_kernel(call, grid, counts)

    def run_library(self, call: PlannedCall, counts: Mapping[str, int]) -> None:
        """Call a library's function."""
        library_functions.FUNCTIONS[call.kernel.function](**self.named(call, counts))

    @abstractmethod
    def run_kernel(self, call: PlannedCall, grid: tuple[int, int, int], counts: Mapping[str, int]) -> None:
        """Run a kernel that does not belong to a library."""

    def named(self, call: PlannedCall, counts: Mapping[str, int]) -> dict[str, Tensor | int | float]:
        """A call's arguments by name, its pointers as tensors from there to the end of their memory."""
        return call.named_arguments(lambda pointer: self._tensor(pointer, counts), counts)

    def _tensor(self, pointer: Pointer, counts: Mapping[str, int]) -> Tensor:
        memory = self._memory[pointer.space, pointer.name].view(torch.uint8)
        offset = pointer.offset.at(tokens=counts["T"], logit_rows=counts["L"])
        dtype = TORCH_DTYPES[pointer.dtype]
        end = memory.numel() - (memory.numel() - offset) % dtype.itemsize
        return memory[offset:end].view(dtype)
