"""Open a compiled GPU engine on torch's current device."""

from __future__ import annotations

import sys

import torch

from llmc.engine_format import EngineDirectory
from llmc.runtime.device.binaries import binaries_for
from llmc.runtime.device.device import check_device_count, open_device
from llmc.runtime.device.memory import memory_of_blocks, plan_device_memory
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.kv_capacity import share_bytes


def open_engine(request: OpeningRequest) -> tuple[CudaExecutor, int]:
    """Open the engine on torch's current device; for several ranks, the executor of the first. Without a given number
    of blocks, the number that fits.

    Raises TargetError, ToolchainError, OptionError or RankError if it cannot run.
    """
    request.wait_for_weights()
    engine, (kv_cache_bytes, kv_memory, state_cache_bytes) = request.directory, request.room
    device = open_device(engine.path)
    check_device_count(engine.path, engine.program.ranks)
    binaries = binaries_for(engine, device, lambda line: print(f"llmc: {line}", file=sys.stderr))
    free, _ = torch.cuda.mem_get_info(device.index)
    if kv_memory is not None:
        kv_cache_bytes = share_bytes(free, kv_memory, kv_cache_bytes)
    if request.blocks is None:
        memory = plan_device_memory(binaries.program, free, kv_cache_bytes, request.beside, state_cache_bytes)
    else:
        memory = memory_of_blocks(binaries.program, request.blocks)
    return CudaExecutor(engine, device, binaries, memory), memory.blocks


def open_cuda_rank(engine: EngineDirectory, rank: int, blocks: int) -> CudaExecutor:
    """Return the executor of another rank, on the GPU with its number; `engine` has its weights. Raises TargetError."""
    torch.cuda.set_device(rank)
    device = open_device(engine.path)
    binaries = binaries_for(engine, device, lambda line: print(f"llmc: {line}", file=sys.stderr))
    return CudaExecutor(engine, device, binaries, memory_of_blocks(binaries.program, blocks))
