"""The memory of an engine on a GPU, and the number of KV blocks that fit into the rest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.errors import OptionError, TargetError
from llmc.program import Program, state_bytes
from llmc.program.step_result import largest_result, result_in_words
from llmc.runtime.device.inputs import largest_shape
from llmc.runtime.kv_capacity import cache_bytes, fitting_blocks, share_bytes, wanted_blocks
from llmc.runtime.prefix_cache.snapshot_capacity import snapshot_count

# Memory for graphs, the library's own workspaces and fragmentation: a share of the free memory, and a minimum in bytes.
RESERVED_FRACTION = 0.05
RESERVED_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one rank by purpose. logits: those of a step, or the rows for the next stage. blocks: number of blocks
    of the first group of caches that requests use. Each group has one more block for padding, which counts in `cache`.
    seats, snapshots: slots of each state, and one more likewise. result: what `logits` holds, for errors."""

    weights: int
    arena: int
    logits: int
    inputs: int
    adapters: int
    cache: int
    blocks: int
    state: int
    seats: int
    snapshots: int
    result: str = "logits"

    @property
    def slots(self) -> int:
        """Number of slots of each state for requests and snapshots; the slot for padding follows them."""
        return self.seats + self.snapshots

    @property
    def states(self) -> int:
        """The number of all slots, including that for padding."""
        return (self.slots + 1) * self.state

    @property
    def fixed(self) -> int:
        """All bytes except those of the KV cache."""
        return self.weights + self.arena + self.logits + self.inputs + self.adapters + self.states

    def arithmetic(self) -> str:
        """The sum in words, for errors."""
        adapters = f"adapters {_gb(self.adapters)} + " if self.adapters else ""
        kept = f" ({self.snapshots} snapshots among them)" if self.snapshots else ""
        states = f"states {_gb(self.states)}{kept} + " if self.state else ""
        return (
            f"weights {_gb(self.weights)} + arena {_gb(self.arena)} + {self.result} and inputs "
            f"{_gb(self.logits + self.inputs)} + {adapters}{states}KV cache {_gb(self.cache)} "
            f"({self.blocks} blocks and one for padding) = {_gb(self.fixed + self.cache)}"
        )


def plan_device_memory(
    program: Program,
    free: int,
    kv_cache_bytes: int | None,
    beside: Sequence[Program] = (),
    state_cache_bytes: int | None = None,
) -> DeviceMemory:
    """Divide a device's `free` bytes: the KV cache gets the rank's part of kv_cache_bytes, or the remaining bytes.

    beside: programs of engines that will be opened there with the same number of blocks. state_cache_bytes: memory for
    snapshots of states, as in snapshot_count; None takes that of one sequence.

    Never more than every sequence at full length needs. Raises OptionError with the arithmetic if one sequence of
    max_model_len does not fit.
    """
    limits, layout = program.limits, program.layout
    wanted, per_sequence = wanted_blocks(program, kv_cache_bytes)
    least = memory_of_blocks(program, per_sequence)
    programs = (program, *(drafter.with_one_table() for drafter in beside))

    def own_bytes(count: int) -> int:
        return sum(sum(member.memories(count).values()) for member in programs)

    others = [memory_of_blocks(drafter, per_sequence) for drafter in programs[1:]]
    reserved = max(RESERVED_BYTES, int(RESERVED_FRACTION * free))
    padding = sum(memory_of_blocks(member, 0).cache for member in programs)
    left = free - least.fixed - sum(other.fixed for other in others) - reserved - padding
    snapshots = snapshot_count(program, state_cache_bytes, max(0, left - own_bytes(per_sequence)))
    left -= snapshots * least.state
    room = left if kv_cache_bytes is None else min(left, kv_cache_bytes // program.ranks)
    blocks = fitting_blocks(wanted, room, own_bytes)
    if blocks < per_sequence or left < 0:
        given = f"kv_cache_bytes={kv_cache_bytes}"
        if layout.pipeline > 1:
            given = f"the stage's share of kv_cache_bytes, {kv_cache_bytes}"
        limit = "" if kv_cache_bytes is None else f" and {given}"
        drafting = "".join(f", and of the drafter {other.arithmetic()}" for other in others)
        needed = memory_of_blocks(program, per_sequence, snapshots).arithmetic()
        raise OptionError(
            f"one sequence of max_model_len={limits.max_model_len} tokens does not fit: {needed}{drafting}"
            f", with {_gb(reserved)} kept for graphs; the GPU has {_gb(free)} free{limit}",
            at="the GPU's memory" + (f" in stage {program.stage}" if layout.pipeline > 1 else ""),
            fix="free the GPU of other processes, or build with a smaller max_model_len or max_batch_tokens, or for a "
            f"larger GPU{', or load with a smaller state_cache_bytes' if snapshots else ''}",
        )
    return memory_of_blocks(program, blocks, snapshots)


def plan_stage_memory(
    stages: Sequence[Program],
    free: int,
    kv_cache_bytes: int | None,
    beside: Sequence[Program] = (),
    state_cache_bytes: int | None = None,
    kv_memory: float | None = None,
) -> DeviceMemory:
    """The memory of the first stage, with the number of blocks that every stage holds.

    Args:
        stages: The program of each stage.
        free: Free bytes of the device of each rank.
        kv_cache_bytes: Bytes of the KV cache of all ranks; None for the remaining bytes of each.
        beside: As in plan_device_memory, on the first rank.
        state_cache_bytes: As in plan_device_memory.
        kv_memory: The part of each rank's free bytes for its KV cache, instead of kv_cache_bytes.

    Returns:
        The memory of a rank of the first stage.

    Raises:
        OptionError: One sequence of max_model_len tokens does not fit a stage, kv_memory is out of range, or both sizes
            are given.
    """
    first, *later = stages
    _, per_sequence = wanted_blocks(first, kv_cache_bytes)
    whole = sum(cache_bytes(per_sequence, stage) for stage in stages)

    def share(stage: Program) -> int | None:
        if kv_memory is not None:
            return stage.ranks * share_bytes(free, kv_memory, kv_cache_bytes)
        return None if kv_cache_bytes is None else max(1, kv_cache_bytes * cache_bytes(per_sequence, stage) // whole)

    own = plan_device_memory(first, free, share(first), beside, state_cache_bytes)
    blocks = min([own.blocks, *(plan_device_memory(stage, free, share(stage)).blocks for stage in later)])
    return own if blocks == own.blocks else memory_of_blocks(first, blocks, own.snapshots)


def memory_of_blocks(program: Program, blocks: int, snapshots: int = 0) -> DeviceMemory:
    """The memory of a rank with this many blocks and snapshots of states."""
    limits, pools = program.limits, program.adapters
    largest = largest_shape(
        limits,
        program.hidden_width,
        adapters=pools is not None,
        states=bool(program.states),
        groups=len(program.policies),
    )
    return DeviceMemory(
        weights=sum(-(-slot.nbytes // 512) * 512 for slot in program.weights),
        arena=program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows),
        logits=math.prod(largest_result(program)) * 4,
        inputs=largest.input_offsets()["end"],
        adapters=0 if pools is None else sum(pools.nbytes().values()),
        cache=sum(program.memories(blocks, spare=1).values()),
        blocks=blocks,
        state=state_bytes(program.states),
        seats=limits.max_sequences,
        snapshots=snapshots,
        result=result_in_words(program),
    )


def out_of_memory(what: str, asked: str, free: int, total: int, arithmetic: str) -> TargetError:
    """The error for a device without room. asked: The requested memory, as text."""
    return TargetError(
        f"the GPU is out of memory: {what} {asked}, {free / 1e9:.3f} of {total / 1e9:.3f} GB are free; the engine "
        f"needs {arithmetic}",
        at="the GPU's memory",
        fix="load with a smaller kv_cache_bytes, build with a smaller max_batch_tokens or max_model_len, or free the "
        "GPU of other processes",
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"
