"""Run a GPU engine without a GPU: the kernels' own sources through Triton's interpreter, on tensors of the CPU.

For tests and for looking into kernels: thousands of times slower than a device. TRITON_INTERPRET=1 must be in the
environment before Triton is imported. It cuts off what a device rounds to bf16: build with float32 or float16.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

import llmc.ops  # noqa: F401  (registers the ops that the kernels' sources name)
from llmc.engine_format import EngineDirectory
from llmc.errors import OptionError
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import CHOICE_OUTPUTS, Program, StepOutput, library_functions
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.device.adapter_tensors import adapter_tensors, with_adapters
from llmc.runtime.device.device_place import DevicePlace
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.library_only import library_only
from llmc.runtime.device.program import ARENA, RANKS, PlannedCall, Pointer, calls_of_step, plan_calls
from llmc.runtime.executors.executor import Chosen, LaunchTime, Logits, SideArray
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.side_outputs import SideOutputs
from llmc.runtime.executors.slot_views import move_slots, slot_views
from llmc.runtime.executors.state_memory import copy_slot
from llmc.runtime.executors.stored_weights import stored_tensor
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.sampling.row_choice import RowChoices


def open_engine(request: OpeningRequest) -> tuple[TritonInterpreterExecutor, int]:
    """In this machine's memory; of an engine of several ranks, the first one's executor."""
    request.wait_for_weights()
    blocks, snapshots = request.in_host_memory()
    return interpret_rank(request.directory, blocks, snapshots), blocks


def interpret_rank(engine: EngineDirectory, blocks: int, snapshots: int = 0) -> TritonInterpreterExecutor:
    """One rank's executor; `engine` has its weights."""
    slots = zip(engine.program.weights, engine.tensors, strict=True)
    weights = {slot.name: stored_tensor(engine, stored) for slot, stored in slots}
    return TritonInterpreterExecutor(engine.program, engine.path, weights, blocks, snapshots)


class TritonInterpreterExecutor:
    """The program's kernels with weights and a KV cache of `blocks` blocks, in the CPU's memory.

    directory: the engine's, or any that has the kernels' sources. weights: by slot name, as the program lays them out.
    snapshots: how many of states there may be.
    """

    def __init__(
        self, program: Program, directory: Path, weights: Mapping[str, Tensor], blocks: int, snapshots: int = 0
    ) -> None:
        switch_on()
        allow_computed_bounds()
        self.program, self.limits = program, program.limits
        limits = program.limits
        self._blocks, self.snapshots = program.group_blocks(blocks), snapshots
        self._calls = plan_calls(program)
        self._sides = SideOutputs(program)
        sources = {kernel.source for kernel in program.kernels if not kernel.is_library}
        modules = {source: _load_module(directory / source) for source in sorted(sources)}
        self._functions = {k.name: getattr(modules[k.source], k.function) for k in program.kernels if not k.is_library}
        arena_bytes = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
        self._logits = torch.zeros(limits.max_logit_rows, program.vocab_size)
        self._memory: dict[tuple[str, str], Tensor] = {
            (ARENA, ""): torch.zeros(arena_bytes, dtype=torch.uint8),
            ("output", "logits"): self._logits,
        }
        for name, dtype in CHOICE_OUTPUTS.items():
            self._memory["output", name] = torch.zeros(limits.max_logit_rows, dtype=TORCH_DTYPES[dtype])
        for name, weight in weights.items():
            self._memory["weight", name] = weight.reshape(-1)
        self._pools = adapter_tensors(program, self._add_pool)
        for name, nbytes in program.memories(blocks).items():
            self._memory["cache", name] = torch.zeros(nbytes, dtype=torch.uint8)
        for name, state in program.state_names().items():
            # NaNs: of a slot nothing may be read that no step has written.
            nbytes = (limits.max_sequences + snapshots) * state.nbytes
            self._memory["state", name] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def step(self, step: Step) -> Logits:
        """The wanted rows' logits."""
        self._launch_all(step, StepOutput.LOGITS)
        return self.logits(0, len(step.logit_rows))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """The wanted rows' tokens."""
        for name, values in choices.arrays().items():
            self._memory["input", name] = torch.from_numpy(values.copy())
        self._memory["output", "covered"].fill_(1)
        self._launch_all(step, wanted)
        rows = len(step.logit_rows)
        tokens, scores, covered = (self._memory["output", name][:rows].numpy() for name in CHOICE_OUTPUTS)
        return Chosen(tokens, scores, covered.astype(np.bool_))

    def logits(self, first: int, count: int) -> Logits:
        logits: Logits = self._logits[first : first + count].numpy()
        return logits

    def side_output(self, name: str) -> SideArray:
        return self._sides.array(name, self._memory[ARENA, ""].numpy()[self._sides.place(name)])

    def step_timed(self, step: Step) -> tuple[LaunchTime, ...]:
        """As `step`; how long the interpreter took for each launch, which says nothing about a GPU."""
        return self._launch_all(step, StepOutput.LOGITS)

    def join(self, place: DevicePlace) -> None:
        """Where other ranks' memory is, before the first step."""
        self._memory[RANKS] = place.table
        self._calls = plan_calls(self.program if place.has_memory else library_only(self.program))

    def follow(self, step: Step) -> None:
        """A step of which nobody here wants the results."""
        self._launch_all(step, StepOutput.LOGITS)

    def put_adapter(self, slot: int, adapter: PlacedAdapter) -> None:
        assert self._pools is not None, "the engine takes no adapters"
        self._pools.put(slot, adapter)

    def _add_pool(self, name: str, nbytes: int) -> Tensor:
        return self._memory.setdefault(("adapter", name), torch.zeros(nbytes, dtype=torch.uint8))

    def _launch_all(self, step: Step, wanted: StepOutput) -> tuple[LaunchTime, ...]:
        """Every launch in turn. What they write starts as NaNs, so that nothing is read that the step did not write."""
        step = (step if self._pools is None else with_adapters(step)).for_groups(self._blocks[1:])
        self._memory[ARENA, ""].fill_(0xFF)
        self._logits.fill_(float("nan"))
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

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        for name in self.program.caches_of(group):
            blocks = self._memory["cache", name].view(self._blocks[group], -1)
            blocks[list(copies)] = blocks[list(copies.values())]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        caches = [self._memory["cache", name] for name in self.program.caches_of(group)]
        indices = torch.from_numpy(sources).long(), torch.from_numpy(destinations).long()
        move_slots(slot_views(self.program, caches, group), *indices)

    def copy_states(self, source: int, destination: int) -> None:
        """Copy a slot of every state."""
        states = (self._memory["state", name] for name in self.program.state_names())
        copy_slot(self.program, states, source, destination)

    def close(self) -> None:
        """Drop the memory."""
        self._memory.clear()

    def _run(self, call: PlannedCall, grid: tuple[int, int, int], counts: Mapping[str, int]) -> None:
        values = call.named_arguments(lambda pointer: self._tensor(pointer, counts), counts)
        if call.kernel.is_library:
            library_functions.FUNCTIONS[call.kernel.function](**values)
        else:
            # Lanes that nothing is stored of, such as a tile's rows past the last query, divide 0 by 0, as a GPU's do.
            with np.errstate(invalid="ignore"):
                self._functions[call.kernel.name][grid](**call.kernel.constants, **values)

    def _tensor(self, pointer: Pointer, counts: Mapping[str, int]) -> Tensor:
        memory = self._memory[pointer.space, pointer.name].view(torch.uint8)
        offset = pointer.offset.at(tokens=counts["T"], logit_rows=counts["L"])
        dtype = TORCH_DTYPES[pointer.dtype]
        end = memory.numel() - (memory.numel() - offset) % dtype.itemsize
        return memory[offset:end].view(dtype)


def switch_on() -> None:
    """Set TRITON_INTERPRET=1, which Triton looks at when it is imported. Raises OptionError if it has been."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise OptionError(
            "this process has loaded Triton without its interpreter, as every build for a GPU does",
            at="executor='triton_interpreter'",
            fix="set TRITON_INTERPRET=1 before Python starts, or load the engine in a process of its own",
        )
    os.environ["TRITON_INTERPRET"] = "1"


def allow_computed_bounds() -> None:
    """Let kernels loop up to numbers that they compute, with a Triton older than 3.9 and NumPy 2.4 or newer.

    The interpreter keeps such a number in an array of one element, which NumPy takes as an index no longer; newer
    Triton squeezes it first. Doing this again changes nothing.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__module__ == __name__:
        return

    def patch_and_squeeze(tensor: Any, *rest: Any) -> None:
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_squeeze


def _load_module(path: Path) -> Any:
    """A file of kernels as a module of its own; it may import what the installed llmc has."""
    spec = importlib.util.spec_from_file_location(f"llmc_engine_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
