"""Run a compiled GPU engine: launches its binaries on torch's stream, in memory of torch's allocator.

Steps in which every request brings one token run as CUDA graphs, one for each bucket of shapes. A step costs one copy
of its inputs to the device; back come the logits, or, when all requests are greedy, only the best tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.errors import TargetError
from llmc.program import Limits
from llmc.runtime.device import Device, open_device
from llmc.runtime.device_arguments import PackedArguments, argument_values, extra_pointers, scratch_bytes
from llmc.runtime.device_binaries import DeviceBinaries, binaries_for
from llmc.runtime.device_inputs import StepShape, decode_bucket, example_step, largest_shape, pack_inputs, padded
from llmc.runtime.device_memory import DeviceMemory, plan_device_memory
from llmc.runtime.device_program import ARENA, PlannedCall, plan_calls
from llmc.runtime.executors.cuda_driver import LoadedKernel, load_kernel
from llmc.runtime.executors.executor import Best, Logits
from llmc.runtime.graph_cache import GraphCache
from llmc.runtime.kv_capacity import share_bytes
from llmc.runtime.memory import mapped_file
from llmc.runtime.step import Step

MAX_GRAPHS = 64
# Below this much free memory no graph is captured.
_GRAPH_ROOM_BYTES = 64 << 20
_STAGING_BYTES = 64 << 20


def open_cuda(engine: EngineDirectory, kv_cache_bytes: int | None, kv_memory: float | None = None) -> CudaExecutor:
    """The engine on torch's current device. Raises TargetError, ToolchainError or OptionError if it cannot run."""
    device = open_device(engine.path)
    binaries = binaries_for(
        engine, device.capability, device.shared_memory, lambda line: print(f"llmc: {line}", file=sys.stderr)
    )
    free, _ = torch.cuda.mem_get_info(device.index)
    if kv_memory is not None:
        kv_cache_bytes = share_bytes(free, kv_memory, kv_cache_bytes)
    memory = plan_device_memory(engine.program, free, kv_cache_bytes)
    return CudaExecutor(engine, device, binaries, memory)


class CudaExecutor:
    """Binaries, weights, KV cache, arena and graphs on one device. blocks: of the cache that requests may use."""

    def __init__(self, engine: EngineDirectory, device: Device, binaries: DeviceBinaries, memory: DeviceMemory) -> None:
        self.blocks = memory.blocks
        self._program, self._limits, self._arch = engine.program, engine.program.limits, binaries.arch
        self._device, self._memory_plan = torch.device("cuda", device.index), memory
        self._kernels: dict[str, LoadedKernel] = {}
        self._files: list[Tensor] = []
        self._memory: dict[tuple[str, str], Tensor] = {}
        self._addresses: dict[tuple[str, str], int] = {}
        rows = self._limits.max_logit_rows
        self._copy_weights(engine)
        self._add((ARENA, ""), memory.arena, "the arena of activations")
        self._logits = self._add(("output", "logits"), memory.logits, "logits").view(torch.float32).view(rows, -1)
        for i, cache in enumerate(self._program.caches):
            for part, nbytes in zip("kv", cache.key_and_value_bytes(self._limits.block_size), strict=True):
                # Zeroed: what padding reads of the scratch block, and masked loads of a block's end, must be finite.
                self._add(("cache", f"{i}.{part}"), (memory.blocks + 1) * nbytes, f"layer {i}'s KV cache").zero_()
        inputs = largest_shape(self._limits).input_offsets()["end"]
        self._inputs = self._allocate(inputs, "step inputs")
        self._staged_inputs = torch.empty(inputs, dtype=torch.uint8, pin_memory=True)
        self._best = self._allocate(rows * 8, "best tokens").view(torch.int64)
        self._best_logits = self._allocate(rows * 4, "best logits").view(torch.float32)
        self._host_best = torch.empty(rows, dtype=torch.int64, pin_memory=True)
        self._host_best_logits = torch.empty(rows, dtype=torch.float32, pin_memory=True)
        self._host_logits: Tensor | None = None
        self._scratch: list[Tensor] = []
        planned = plan_calls(self._program)
        used = {call.kernel.name for call in planned}
        by_name = {kernel.name: kernel for kernel in binaries.kernels}
        for name in sorted(used):
            self._kernels[name] = load_kernel(by_name[name].binaries[self._arch], binaries.directory)
        self._calls = [_with_binaries(call, by_name) for call in planned]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: GraphCache[StepShape, torch.cuda.CUDAGraph] = GraphCache(MAX_GRAPHS, self._has_graph_room)

    def step(self, step: Step) -> Logits:
        """The wanted rows' logits; the array is overwritten by the next step."""
        self._run(step)
        rows = len(step.logit_rows)
        if self._host_logits is None or len(self._host_logits) < rows:
            self._host_logits = torch.empty(rows, self._program.vocab_size, pin_memory=True)
        self._host_logits[:rows].copy_(self._logits[:rows], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        logits: Logits = self._host_logits[:rows].numpy()
        return logits

    def best(self, step: Step) -> Best:
        """The wanted rows' largest logits and their tokens: the only bytes that come back."""
        self._run(step)
        rows = len(step.logit_rows)
        self._host_best[:rows].copy_(self._best[:rows], non_blocking=True)
        self._host_best_logits[:rows].copy_(self._best_logits[:rows], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return Best(self._host_best[:rows].numpy(), self._host_best_logits[:rows].numpy())

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Copy blocks of every layer's keys and values, on the device and in order with the steps."""
        to = torch.tensor(list(copies), device=self._device)
        source = torch.tensor(list(copies.values()), device=self._device)
        for (space, _), memory in self._memory.items():
            if space == "cache":
                blocks = memory.view(self.blocks + 1, -1)
                blocks.index_copy_(0, to, blocks.index_select(0, source))

    def close(self) -> None:
        """Free the device's memory."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        for held in (self._memory, self._addresses, self._kernels):
            held.clear()
        for several in (self._files, self._scratch, self._calls):
            several.clear()
        for name in ("_logits", "_inputs", "_best", "_best_logits"):
            delattr(self, name)
        torch.cuda.empty_cache()

    def _run(self, step: Step) -> None:
        bucket = decode_bucket(step, self._limits)
        if bucket is not None:
            step = padded(step, bucket, self._limits.block_size, self.blocks)
        shape = bucket or StepShape.of(step)
        nbytes = pack_inputs(step, shape, self._staged_inputs.numpy())
        self._inputs[:nbytes].copy_(self._staged_inputs[:nbytes], non_blocking=True)
        graph = None if bucket is None else self._graphs.get(bucket, self._capture)
        if graph is None:
            self._launch_all(shape)
        else:
            graph.replay()

    def _capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._launch_all(shape)
        return graph

    def _launch_all(self, shape: StepShape) -> None:
        """Queue every launch of a step whose inputs lie in `_inputs`, then the choice of the best tokens."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for call, grid in self.launches(shape):
            self.launch(call, grid, shape, stream)
        rows = shape.logit_rows
        if rows:
            torch.max(self._logits[:rows], dim=-1, out=(self._best_logits[:rows], self._best[:rows]))

    def launches(self, shape: StepShape) -> list[tuple[PlannedCall, tuple[int, int, int]]]:
        """The calls that a step of this shape has, with their grids."""
        counts = shape.counts()
        present = [call for call in self._calls if call.runs(tokens=shape.tokens, logit_rows=shape.logit_rows)]
        with_grids = [(call, call.programs(counts)) for call in present]
        return [(call, grid) for call, grid in with_grids if all(grid)]

    def launch(self, call: PlannedCall, grid: tuple[int, int, int], shape: StepShape, stream: int) -> None:
        """Queue one launch with its own kernel."""
        self.launch_as(self._kernels[call.kernel.name], call, grid, shape, stream)

    def launch_as(
        self, kernel: LoadedKernel, call: PlannedCall, grid: tuple[int, int, int], shape: StepShape, stream: int
    ) -> None:
        """Queue one launch of another binary for the same kernel."""
        wanted = scratch_bytes(kernel.binary, grid)
        extra = extra_pointers(kernel.binary, self._scratch_address(wanted, kernel.binary.scratch_alignment))
        arguments = PackedArguments(argument_values(call, shape, self._address_in(shape), extra))
        kernel.launch(grid, stream, arguments.address)

    @property
    def limits(self) -> Limits:
        """The largest step's counts."""
        return self._limits

    def kernel(self, name: str) -> LoadedKernel:
        """The loaded kernel of that name."""
        return self._kernels[name]

    def load_example(self, shape: StepShape) -> None:
        """Put the inputs of a step of that shape on the device, whose requests are at their longest, for measuring."""
        example = example_step(shape, self._limits, self.blocks)
        nbytes = pack_inputs(example, shape, self._staged_inputs.numpy())
        self._inputs[:nbytes].copy_(self._staged_inputs[:nbytes])

    def _address_in(self, shape: StepShape) -> Callable[[str, str], int]:
        inputs, base = shape.input_offsets(), self._inputs.data_ptr()

        def address(space: str, name: str) -> int:
            return base + inputs[name] if space == "input" else self._addresses[space, name]

        return address

    def _scratch_address(self, wanted: int, alignment: int) -> int:
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
        self._memory[key] = self._allocate(nbytes, what)
        self._addresses[key] = self._memory[key].data_ptr()
        return self._memory[key]

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        try:
            return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self._device)
            raise out_of_memory(what, nbytes, free, total, self._memory_plan.arithmetic()) from None

    def _copy_weights(self, engine: EngineDirectory) -> None:
        """Each file once, through two pinned buffers: one fills from the mapped file while the other is copied."""
        staging = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event() for _ in staging]
        bases: dict[Any, tuple[int, int]] = {}
        turn = 0
        for path in sorted({stored.path for stored in engine.tensors}):
            source = mapped_file(path)
            held = [stored for stored in engine.tensors if stored.path == path]
            begin, end = min(s.begin for s in held), max(s.end for s in held)
            target = self._allocate(end - begin, f"the weights in {path.name}")
            self._files.append(target)
            bases[path] = begin, target.data_ptr()
            for start in range(begin, end, _STAGING_BYTES):
                stop = min(start + _STAGING_BYTES, end)
                copied[turn].synchronize()
                staging[turn].numpy()[: stop - start] = source[start:stop]
                target[start - begin : stop - begin].copy_(staging[turn][: stop - start], non_blocking=True)
                copied[turn].record()
                turn = 1 - turn
        torch.cuda.current_stream(self._device).synchronize()
        for slot, stored in zip(engine.program.weights, engine.tensors, strict=True):
            begin, base = bases[stored.path]
            self._addresses["weight", slot.name] = base + stored.begin - begin


def _with_binaries(call: PlannedCall, kernels: Mapping[str, Any]) -> PlannedCall:
    return PlannedCall(kernels[call.kernel.name], call.arguments, call.grid, call.only)


def out_of_memory(what: str, nbytes: int, free: int, total: int, arithmetic: str) -> TargetError:
    """What to tell the user when the device has no room."""
    return TargetError(
        f"the GPU is out of memory: {what} asked for {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} of {total / 1e9:.3f} GB "
        f"are free; the engine needs {arithmetic}",
        at="the GPU's memory",
        fix="load with a smaller kv_cache_bytes, build with a smaller max_batch_tokens or max_model_len, or free the "
        "GPU of other processes",
    )
