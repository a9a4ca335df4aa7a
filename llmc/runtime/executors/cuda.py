"""Run a compiled GPU engine: launches its binaries on torch's stream, in memory of torch's allocator.

Steps in which every request brings one token, and small steps with prompts if they have buckets, run as CUDA graphs,
one for each bucket of shapes and each way of choosing tokens, which contain the copies of inputs to the device and of
the chosen tokens back: a step fills pinned memory, replays the graph and waits. A step may be queued while another
runs, from whose tokens it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.errors import TargetError
from llmc.program import CHOICE_OUTPUTS, Launch, StepOutput
from llmc.program.arrival_counters import ARRIVALS, MOST_COUNTERS
from llmc.program.step_result import largest_result, result_rows
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.device.adapter_tensors import adapter_tensors, with_adapters
from llmc.runtime.device.arguments import PackedArguments, argument_values, extra_pointers, scratch_bytes
from llmc.runtime.device.binaries import DeviceBinaries
from llmc.runtime.device.call_selection import Grid
from llmc.runtime.device.device import Device
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.device.graph_cache import GraphCache
from llmc.runtime.device.inputs import StepShape, example_step
from llmc.runtime.device.library_only import library_only
from llmc.runtime.device.memory import DeviceMemory, out_of_memory
from llmc.runtime.device.program import ARENA, RANKS, PlannedCall, calls_of_step, plan_calls
from llmc.runtime.device.prompt_inputs import PromptSizes
from llmc.runtime.device.step_lane import StepKind, StepLane
from llmc.runtime.device.warm_up import warm_up_steps
from llmc.runtime.device.weights import DeviceWeights, device_weights
from llmc.runtime.executors.cuda_caches import CudaCaches
from llmc.runtime.executors.cuda_compaction import CudaCompaction
from llmc.runtime.executors.cuda_driver import LoadedKernel, load_kernel
from llmc.runtime.executors.cuda_launches import CudaLaunches
from llmc.runtime.executors.executor import Chosen, LaunchTime, Logits, SideArray
from llmc.runtime.executors.library_calls import DeviceTensors, Views, library_call
from llmc.runtime.executors.side_outputs import SideOutputs
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.sampling.row_choice import RowChoices

# Three of them are of the same steps: one that is not fed, and one of each lane.
MAX_GRAPHS = 192
# Below this much free memory no graph is captured.
_GRAPH_ROOM_BYTES = 64 << 20
# Kernels are compiled for pointers to multiples of 16 bytes.
_ROW_ALIGNMENT = 16


class CudaExecutor(CudaCaches):
    """Binaries, weights, KV cache, arena and graphs on one device. blocks, snapshots: number of blocks that requests
    may use, and of snapshots. weights: brings the weights to the device, by default from the engine's files. prompts:
    the buckets of steps that are not decodes; None launches these one by one."""

    def __init__(
        self,
        engine: EngineDirectory,
        device: Device,
        binaries: DeviceBinaries,
        memory: DeviceMemory,
        weights: DeviceWeights | None = None,
        prompts: PromptSizes | None = None,
    ) -> None:
        self.blocks = memory.blocks
        self._program, self.limits = binaries.program, binaries.program.limits
        self.snapshots = memory.snapshots
        self._device, self._memory_plan = torch.device("cuda", device.index), memory
        self._kernels: dict[str, LoadedKernel] = {}
        # The memory that each space is in, and at which byte it starts.
        self._spaces: dict[tuple[str, str], tuple[Tensor, int]] = {}
        self._addresses: dict[tuple[str, str], int] = {}
        for name, (whole, start) in (weights or device_weights)(engine, self._allocate).items():
            self._spaces["weight", name] = whole, start
            self._addresses["weight", name] = whole.data_ptr() + start
        self._add((ARENA, ""), memory.arena, "the arena of activations")
        self._add((ARRIVALS.space, ARRIVALS.name), MOST_COUNTERS * 4, "counters of arrived programs").zero_()
        result = self._add(("output", "logits"), memory.logits, "logits")
        self._logits = result.view(torch.float32).view(largest_result(self._program))
        self._group_blocks = self._program.group_blocks(memory.blocks)
        for name, nbytes in self._program.memories(memory.blocks, spare=1).items():
            # Zeroed: what padding reads of the scratch block, and masked loads of a block's end, must be finite.
            self._add(("cache", name), nbytes, f"layer {name.partition('.')[0]}'s KV cache").zero_()
        for name, state in self._program.state_names().items():
            self._add(("state", name), (memory.slots + 1) * state.nbytes, f"state {name}")
        self._pools = adapter_tensors(self._program, self._add_pool)
        self._inputs = self._allocate(memory.inputs, "step inputs")
        # One run of memory, so that a single copy brings all of them back.
        padded_rows = -(-self.limits.max_logit_rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        chosen = self._allocate(len(CHOICE_OUTPUTS) * padded_rows * 4, "chosen tokens")
        self._chosen = chosen.view(torch.int32).view(len(CHOICE_OUTPUTS), padded_rows).zero_()
        for name, part in zip(CHOICE_OUTPUTS, self._chosen, strict=True):
            self._addresses["output", name] = part.data_ptr()
        self._fed = self._chosen[0].clone()
        self._prompts = prompts
        self._lanes = [self._lane(memory) for _ in range(2)]
        self._last_lane = 0
        self._every_row = np.ones(self.limits.max_logit_rows, np.bool_)
        self._host_logits: Tensor | None = None
        self._scratch: list[Tensor] = []
        self._sides = SideOutputs(self._program)
        for kernel in self._program.launched_kernels():
            self._kernels[kernel.name] = load_kernel(kernel.binaries[binaries.arch], binaries.directory)
        self._tensors = DeviceTensors(self._spaces, self._inputs)
        # Null until the ranks have met.
        self._launches = self._launches_of(plan_calls(self._program), {RANKS: 0} | self._addresses)
        self._mover = CudaCompaction(self._program, self._addresses, self._launches_of, self._allocate)
        self._capturing = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: GraphCache[StepKind, torch.cuda.CUDAGraph] = GraphCache(MAX_GRAPHS, self._has_graph_room)

    def step(self, step: Step) -> Logits:
        """The wanted rows' logits, or the rows for the next stage; the array is overwritten by the next step."""
        with torch.cuda.device(self._device):
            self._run(step, StepOutput.LOGITS, None)
        return self.logits(0, result_rows(self._program, len(step.input_ids), len(step.logit_rows)))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """The wanted rows' tokens: the only bytes that come back."""
        return self.queue(step, wanted, choices)()

    def queue(
        self, step: Step, wanted: StepOutput, choices: RowChoices, *, is_fed: bool = False
    ) -> Callable[[], Chosen]:
        """Begin a step, in order with the others; the returned function waits for its tokens."""
        with torch.cuda.device(self._device):
            lane = self._run(step, wanted, choices, is_fed=is_fed)
        return partial(self._read, lane, len(step.logit_rows), wanted)

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Capture the graphs of buckets, in memory that no request uses; yields how many are done, and of how many."""
        wish = self._program, self._group_blocks, self._memory_plan.slots, self._prompts
        steps = warm_up_steps(*wish, limit=MAX_GRAPHS // 2)
        for done, (step, wanted, choices) in enumerate(steps):
            yield done, len(steps)
            if not self._has_graph_room():
                return
            with torch.cuda.device(self._device):
                for _ in range(2):  # A graph is captured at the second use.
                    self._run(step, wanted, choices)
                torch.cuda.current_stream(self._device).synchronize()
        if steps:
            yield len(steps), len(steps)

    def _read(self, lane: StepLane, rows: int, wanted: StepOutput) -> Chosen:
        lane.done.synchronize()
        tokens, scores, covered = lane.chosen.numpy()[:, :rows]
        # Only a filtered step reports which rows are covered; others cover every row.
        is_covered = covered.astype(np.bool_) if wanted is StepOutput.FILTERED else self._every_row[:rows]
        return Chosen(tokens, scores.view(np.float32), is_covered)

    def logits(self, first: int, count: int) -> Logits:
        if self._host_logits is None or len(self._host_logits) < count:
            self._host_logits = torch.empty(count, self._logits.shape[1], pin_memory=True)
        with torch.cuda.device(self._device):
            self._host_logits[:count].copy_(self._logits[first : first + count], non_blocking=True)
            torch.cuda.current_stream().synchronize()
        logits: Logits = self._host_logits[:count].numpy()
        return logits

    def side_output(self, name: str) -> SideArray:
        """A side output of the last step, copied from the device."""
        place = self._sides.place(name)
        memory, start = self._spaces[ARENA, ""]
        return self._sides.array(name, memory[start + place.start : start + place.stop].cpu().numpy())

    def step_timed(self, step: Step) -> tuple[LaunchTime, ...]:
        """Run one step without graphs, an event after each launch; a launch's time includes the gap before it."""
        step = (step if self._pools is None else with_adapters(step)).for_groups(self._group_blocks[1:])
        shape = StepShape.of(step)
        lane = self._lanes[0]
        lane.pack(step, shape)
        with torch.cuda.device(self._device):
            self._copy_inputs(shape, lane.staged)
            prepared = self._launches.prepare(shape, StepOutput.LOGITS, step.sides)
            stream = torch.cuda.current_stream(self._device)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(prepared) + 1)]
            events[0].record(stream)
            for call, event in zip(prepared, events[1:], strict=True):
                self._launches.queue((call,), shape, stream.cuda_stream)
                event.record(stream)
            stream.synchronize()
        ends = [events[0].elapsed_time(event) / 1e3 for event in events]
        indices = [self._launches.calls[place].index for place, _ in prepared]
        return tuple(LaunchTime(index, ends[i], ends[i + 1]) for i, index in enumerate(indices))

    def join(self, place: DevicePlace) -> None:
        """Connect to the other ranks' memory. Graphs of earlier steps contain the addresses of an earlier place."""
        self._graphs.clear()
        self._spaces[RANKS] = place.table.view(torch.uint8), 0
        self._addresses[RANKS] = place.table.data_ptr()
        program = self._program if place.has_memory else library_only(self._program)
        self._launches = self._launches_of(plan_calls(program), self._addresses)

    def follow(self, step: Step) -> None:
        """Queue a step whose results are not needed on this rank, and wait for it."""
        with torch.cuda.device(self._device):
            self._run(step, StepOutput.LOGITS, None)
            torch.cuda.current_stream().synchronize()

    def compact(self, compaction: Ints) -> None:
        """Choose and move a request's rows, on the device and in order with the steps."""
        with torch.cuda.device(self._device):
            self._mover.run(compaction, torch.cuda.current_stream(self._device).cuda_stream)

    def put_adapter(self, slot: int, adapter: PlacedAdapter) -> None:
        """Copy an adapter into a slot of the pools, in order with the steps."""
        assert self._pools is not None, "the engine takes no adapters"
        self._pools.put(slot, adapter)

    def close(self) -> None:
        """Free the device's memory."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        for held in (self._spaces, self._addresses, self._kernels):
            held.clear()
        self._scratch.clear()
        for name in ("_logits", "_inputs", "_chosen", "_fed", "_lanes", "_pools", "_tensors", "_launches", "_mover"):
            delattr(self, name)
        torch.cuda.empty_cache()

    def _run(self, step: Step, wanted: StepOutput, choices: RowChoices | None, *, is_fed: bool = False) -> StepLane:
        """Queue a step; returns its lane. Fed steps alternate between the lanes, others take the first for fewer
        graphs."""
        step = (step if self._pools is None else with_adapters(step)).for_groups(self._group_blocks[1:])
        self._last_lane = 1 - self._last_lane if is_fed else 0
        lane = self._lanes[self._last_lane]
        bucket = lane.write(step, choices)
        shape = bucket or StepShape.of(step)
        if bucket is None:
            lane.pack(step, shape, choices)
        self._sides.note_step(shape.tokens, shape.logit_rows)
        kind = StepKind(shape, wanted, step.sides, self._last_lane, is_fed)
        try:
            graph = None if bucket is None else self._graphs.get(kind, self._capture)
            if graph is None:
                self._queue(kind)
            else:
                graph.replay()
            lane.done.record()
        except torch.OutOfMemoryError as error:
            # Only a library's workspace or a graph allocates in a step; torch's message has the size.
            reason = " ".join(str(error).split())[:120]
            raise self._out_of_memory(f"a step of {shape.tokens} tokens", reason) from None
        return lane

    def _capture(self, key: StepKind) -> torch.cuda.CUDAGraph:
        if not self._graphs:
            # torch refuses a pool again whose last graph was dropped.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Work of other threads on this or another GPU meanwhile is not captured and must not make the capture fail.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"):
            self._queue(key)
        return graph

    def _copy_inputs(self, shape: StepShape, staged: Tensor, *, chooses: bool = False) -> None:
        """Queue the copy of a step's staged inputs to the device, from which launches read them."""
        nbytes = shape.input_bytes(chooses=chooses)
        self._inputs[:nbytes].copy_(staged[:nbytes], non_blocking=True)

    def _queue(self, kind: StepKind) -> None:
        """Queue a step whose inputs are staged, with the copies to the device and back, which a graph thus contains."""
        shape, wanted, lane = kind.shape, kind.wanted, self._lanes[kind.lane]
        chooses = wanted is not StepOutput.LOGITS
        if kind.is_fed:
            # Also of a row without usable logits, the token must be one that has an embedding.
            torch.clamp(self._chosen[0], 0, self._program.vocab_size - 1, out=self._fed)
        self._copy_inputs(shape, lane.staged, chooses=chooses)
        if kind.is_fed:
            # A copy comes last: a launch may begin before a kernel in front of it has ended.
            start = shape.input_offsets()["input_ids"]
            ids = self._inputs[start : start + 4 * shape.tokens].view(torch.int32)
            ids.copy_(self._fed[: shape.tokens], non_blocking=True)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._launches.queue(self._launches.prepare(shape, wanted, kind.sides), shape, stream)
        if chooses:
            lane.chosen.copy_(self._chosen, non_blocking=True)

    def _lane(self, memory: DeviceMemory) -> StepLane:
        staged = torch.empty(memory.inputs, dtype=torch.uint8, pin_memory=True)
        chosen = torch.empty(self._chosen.shape, dtype=torch.int32, pin_memory=True)
        room = self._group_blocks, memory.slots
        return StepLane(self.limits, staged, chosen, torch.cuda.Event(), *room, self._prompts)

    def _launches_of(self, calls: Sequence[PlannedCall], addresses: Mapping[tuple[str, str], int]) -> CudaLaunches:
        return CudaLaunches(calls, self._kernels, addresses, self._tensors, self._scratch_address)

    def launches(
        self, shape: StepShape, wanted: StepOutput = StepOutput.LOGITS, sides: tuple[str, ...] = ()
    ) -> list[tuple[PlannedCall, Grid]]:
        """The calls that a step of this shape has, with their grids."""
        return calls_of_step(self._launches.calls, shape.counts(), wanted, sides)

    def bound(
        self, call: PlannedCall, grid: Grid, shape: StepShape, kernel: LoadedKernel | None
    ) -> Callable[[int], None]:
        """A function that queues a launch on a stream again and again. kernel: any binary for the call's kernel; None
        for a library's call, which is queued on torch's current stream."""
        if kernel is None:
            run = library_call(call, self._tensors)
            views: Views = {}
            return lambda stream: run(shape, views)
        wanted = scratch_bytes(kernel.binary, grid)
        extra = extra_pointers(kernel.binary, self._scratch_address(wanted, kernel.binary.scratch_alignment))
        arguments = PackedArguments(argument_values(call, shape, self._address_in(shape), extra))
        return lambda stream: kernel.launch(grid, stream, arguments.address)

    def plan(self, launches: Sequence[Launch]) -> tuple[PlannedCall, ...]:
        """Plan launches as calls. launches: The program's own, or alternatives that use only its buffers."""
        return plan_calls(replace(self._program, launches=tuple(launches)))

    def kernel(self, name: str) -> LoadedKernel:
        return self._kernels[name]

    def load_example(self, shape: StepShape) -> None:
        """Put the inputs of a step of that shape on the device for measuring. Its requests have their maximum
        length."""
        lane = self._lanes[0]
        lane.pack(example_step(shape, self.limits, min(self._group_blocks)), shape)
        self._copy_inputs(shape, lane.staged)
        torch.cuda.current_stream(self._device).synchronize()

    def _address_in(self, shape: StepShape) -> Callable[[str, str], int]:
        inputs, base = shape.input_offsets(), self._inputs.data_ptr()

        def address(space: str, name: str) -> int:
            return base + inputs[name] if space == "input" else self._addresses[space, name]

        return address

    def _scratch_address(self, wanted: int, alignment: int = 1) -> int:
        """Launches follow each other on one stream, so they share it; graphs keep the addresses of older ones."""
        if not wanted:
            return 0
        if not self._scratch or self._scratch[-1].numel() < wanted:
            self._scratch.append(self._allocate(wanted, "the kernels' scratch memory"))
        address = self._scratch[-1].data_ptr()
        return address + -address % alignment

    def _has_graph_room(self) -> bool:
        return torch.cuda.mem_get_info(self._device)[0] >= _GRAPH_ROOM_BYTES

    def _add(self, key: tuple[str, str], nbytes: int, what: str) -> Tensor:
        memory = self._allocate(nbytes, what)
        self._spaces[key] = memory, 0
        self._addresses[key] = memory.data_ptr()
        return memory

    def _add_pool(self, name: str, nbytes: int) -> Tensor:
        return self._add(("adapter", name), nbytes, "the pools of adapters").zero_()

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        try:
            return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            raise self._out_of_memory(what, f"asked for {nbytes / 1e9:.3f} GB") from None

    def _out_of_memory(self, what: str, asked: str) -> TargetError:
        free, total = torch.cuda.mem_get_info(self._device)
        return out_of_memory(what, asked, free, total, self._memory_plan.arithmetic())
