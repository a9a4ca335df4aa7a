"""Limits and issue rates of a multiprocessor, by NVIDIA compute capability."""

import math
from dataclasses import dataclass

from llmc.targets import GpuTarget


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor. warps, blocks: that it holds at once. fp32_lanes: fp32 results a cycle."""

    warps: int
    blocks: int
    fp32_lanes: int = 128


# Source: CUDA programming guide, "Technical specifications per compute capability".
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, fp32_lanes=64),
    86: Multiprocessor(48, 16),
    89: Multiprocessor(48, 24),
    90: Multiprocessor(64, 32),
    100: Multiprocessor(64, 32),
}
# Registers of a multiprocessor, and the unit in which a warp gets them.
_REGISTERS, _REGISTER_UNIT = 65536, 256
# Shared memory that the system takes of each block.
_RESERVED_SHARED = 1024
# Seconds from a load to its data while memory is busy: it gives about 32 KB for each multiprocessor of an H100, which
# kernels keep in flight there that come near the speed of a copy. Assumed: no device was at hand.
_LOADED_LATENCY = 1.25e-6
_SCHEDULERS = 4


def blocks_per_sm(target: GpuTarget, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that a multiprocessor holds at once, by registers, warps and shared memory.

    Args:
        target: The GPU.
        threads: Threads of a block.
        registers: Registers of a thread.
        shared_bytes: Shared memory of a block, in bytes.
    """
    warps, limits = threads // target.warp_size, MULTIPROCESSORS[int(target.arch)]
    of_warp = -(-registers * target.warp_size // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // of_warp // warps
    by_shared = (target.shared_memory_per_block + _RESERVED_SHARED) // (shared_bytes + _RESERVED_SHARED)
    return min(by_registers, by_shared, limits.warps // warps, limits.blocks)


def bytes_to_keep_in_flight(target: GpuTarget) -> int:
    """Bytes that each multiprocessor must have asked for to fill the memory's bandwidth, by Little's law."""
    return math.ceil(target.bandwidth * _LOADED_LATENCY / target.sm_count)


def bandwidth_in_flight(target: GpuTarget, in_flight: float) -> float:
    """Bytes a second that arrive if each multiprocessor has that many in flight, the target's bandwidth at most."""
    return min(target.bandwidth, in_flight * target.sm_count / _LOADED_LATENCY)


def issue_rate(target: GpuTarget) -> float:
    """Warp instructions per second of all schedulers, at one per cycle each."""
    clock = target.fp32_rate / (2 * MULTIPROCESSORS[int(target.arch)].fp32_lanes * target.sm_count)
    return _SCHEDULERS * clock * target.sm_count
