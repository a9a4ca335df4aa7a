"""Open a compiled GPU engine on torch's current device."""

from __future__ import annotations

import sys

import torch

from llmc.engine_format import EngineDirectory
from llmc.program import Program
from llmc.runtime.device.binaries import binaries_for, program_for
from llmc.runtime.device.device import Device, open_device
from llmc.runtime.device.memory import memory_of_blocks, plan_stage_memory
from llmc.runtime.device.prompt_inputs import PromptSizes, prompt_sizes
from llmc.runtime.device.rank_devices import most_ranks_per_device, rank_devices
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.settings import settings
from llmc.targets import match_device


def open_engine(request: OpeningRequest) -> tuple[CudaExecutor, int]:
    """Open the engine on torch's current device; for several ranks, the executor of the first, on its GPU, which then
    is the current device. Without a given number of blocks, the number that fits.

    Raises TargetError, ToolchainError, OptionError or RankError if it cannot run.
    """
    request.wait_for_weights()
    engine, (kv_cache_bytes, kv_memory, state_cache_bytes) = request.directory, request.room
    device = open_device(engine.path)
    layout = engine.program.layout
    devices = rank_devices(engine.path, layout, torch.cuda.device_count()) if layout.ranks > 1 else (device.index,)
    if device.index != devices[0]:
        torch.cuda.set_device(devices[0])
        device = open_device(engine.path)
    binaries = binaries_for(engine, device, lambda line: print(f"llmc: {line}", file=sys.stderr))
    if request.blocks is None:
        # The other GPUs are assumed to have as much free memory as this one, and all ranks get the part of those that
        # share a GPU with the most others.
        free = torch.cuda.mem_get_info(device.index)[0] // most_ranks_per_device(devices)
        programs = _stage_programs(engine, device)
        memory = plan_stage_memory(programs, free, kv_cache_bytes, request.beside, state_cache_bytes, kv_memory)
    else:
        memory = memory_of_blocks(binaries.program, request.blocks)
    return CudaExecutor(engine, device, binaries, memory, prompts=prompts_of(binaries.program, device)), memory.blocks


def open_cuda_rank(engine: EngineDirectory, rank: int, blocks: int) -> CudaExecutor:
    """Return the executor of another rank, on its GPU; `engine` has its weights. Raises TargetError."""
    torch.cuda.set_device(rank_devices(engine.path, engine.program.layout, torch.cuda.device_count())[rank])
    device = open_device(engine.path)
    binaries = binaries_for(engine, device, lambda line: print(f"llmc: {line}", file=sys.stderr))
    return CudaExecutor(engine, device, binaries, memory_of_blocks(binaries.program, blocks))


def prompts_of(program: Program, device: Device) -> PromptSizes | None:
    """Return the buckets of steps with prompts; None if they are not switched on, or the GPU's rates are unknown."""
    target = match_device(device.name, device.capability, is_hip=False) if settings().prompt_graphs else None
    return None if target is None else prompt_sizes(program, target)


def _stage_programs(engine: EngineDirectory, device: Device) -> list[Program]:
    """Return the program of each stage for GPUs like this one."""
    return [program_for(stage.programs, device).program for stage in engine.stages]
