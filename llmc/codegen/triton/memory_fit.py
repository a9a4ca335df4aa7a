"""Whether an engine fits its GPU's memory: weights, the requested KV cache, the arena and the logits."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmc.errors import OptionError
from llmc.options import BuildOptions
from llmc.program import Program, state_bytes
from llmc.program.step_result import largest_result, result_in_words
from llmc.targets import GpuTarget

# Memory that the driver and the runtime use.
RESERVED_BYTES = 1 << 30


@dataclass(frozen=True)
class _Needs:
    """Bytes of a rank."""

    weights: int
    arena: int
    logits: int
    adapters: int
    states: int

    @property
    def fixed(self) -> int:
        """The bytes without any KV cache."""
        return self.weights + self.arena + self.logits + self.adapters + self.states + RESERVED_BYTES


def check_memory(program: Program, target: GpuTarget, options: BuildOptions) -> None:
    """Raise OptionError with the arithmetic if a GPU cannot hold the engine and the requested sequences.

    If the options set max_sequences and max_model_len, all of these sequences must fit; otherwise one must. The
    defaults guarantee no more, and a step then serves the requests that fit.
    """
    limits, needs = program.limits, _needs(program)
    count = limits.max_sequences if {"max_sequences", "max_model_len"} <= options.model_fields_set else 1
    if options.max_model_len is None:
        count = 1
    cache = _cache_bytes(program, count, limits.max_model_len)
    needed = needs.fixed + cache
    if needed > target.memory_bytes:
        sequences = "one sequence" if count == 1 else f"{count} sequences"
        lower = "max_sequences, " if count > 1 else ""
        lower += "max_loras, " if needs.adapters else ""
        pools = f"adapters {_gb(needs.adapters)} + " if needs.adapters else ""
        pools += f"states {_gb(needs.states)} + " if needs.states else ""
        raise OptionError(
            f"{_part(program)} needs {_gb(needed)}, and {target.name} has {_gb(target.memory_bytes)}: "
            f"weights {_gb(needs.weights)} + KV cache of {sequences} of {limits.max_model_len} tokens {_gb(cache)} + "
            f"arena {_gb(needs.arena)} + {result_in_words(program)} {_gb(needs.logits)} + {pools}"
            f"{_gb(RESERVED_BYTES)} for the driver",
            at=f"target={target.name}",
            fix=f"{_what_fits(program, target, needs, count)}: lower {lower}max_model_len or max_batch_tokens, choose "
            "kv_dtype or dtype of fewer bytes, more ranks, or a larger GPU",
        )


def fitting_sequences(program: Program, target: GpuTarget) -> int:
    """Number of sequences of max_model_len tokens that fit on the GPU with the engine, up to max_sequences."""
    room, limits = target.memory_bytes - _needs(program).fixed, program.limits
    return _most(limits.max_sequences, room, lambda count: _cache_bytes(program, count, limits.max_model_len))


def _what_fits(program: Program, target: GpuTarget, needs: _Needs, count: int) -> str:
    """Describe for an error which sequences fit, and how many ranks would hold everything that was requested."""
    size, room = program.limits.block_size, target.memory_bytes - needs.fixed
    whole = program.limits.blocks_for(program.limits.max_model_len)
    length = size * _most(whole, room, lambda blocks: _cache_bytes(program, 1, blocks * size))
    fits = fitting_sequences(program, target)
    if fits:
        summary = f"at most {fits} of that length fit"
    elif length > 0:
        summary = f"one sequence of at most {length} tokens fits"
    else:
        summary = "not even its weights fit"
    ranks = _enough_ranks(program, target, needs, count)
    return summary if ranks is None else f"{summary}; tensor_parallel_size={ranks} is enough for all of it"


def _enough_ranks(program: Program, target: GpuTarget, needs: _Needs, count: int) -> int | None:
    """The smallest sufficient power of two; None if it is larger than the target's links support.

    Reckoned so that it is enough: matrices are divided, with a part in twenty for padding, and KV heads as far as there
    are any to be divided.
    """
    heads = min((cache.kv_heads for cache in program.caches), default=1) * program.ranks
    cache = _cache_bytes(program, count, program.limits.max_model_len)
    vectors = sum(slot.nbytes for slot in program.weights if len(slot.shape) < 2)
    for ranks in (1 << power for power in range(1, target.links.size.bit_length())):
        parts = ranks // program.ranks
        if parts < 2:
            continue
        weights = vectors + (needs.weights - vectors) * 21 // (20 * parts)
        own = -(-cache // max(1, min(ranks, heads) // program.ranks))
        if weights + own + needs.fixed - needs.weights <= target.memory_bytes:
            return ranks
    return None


def _needs(program: Program) -> _Needs:
    limits = program.limits
    return _Needs(
        weights=sum(slot.nbytes for slot in program.weights),
        arena=program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows),
        logits=4 * math.prod(largest_result(program)),
        adapters=0 if program.adapters is None else sum(program.adapters.nbytes().values()),
        # States of max_sequences sequences, whether they all fit or not, and a slot for padding.
        states=(limits.max_sequences + 1) * state_bytes(program.states),
    )


def _cache_bytes(program: Program, count: int, length: int) -> int:
    """Size of the KV cache of `count` sequences of `length` tokens, if that is the maximum length."""
    limits = replace(program.limits, max_model_len=length)
    return sum(replace(program, limits=limits).memories(count * limits.blocks_for(length)).values())


def _most(count: int, room: int, nbytes: Callable[[int], int]) -> int:
    """The largest number, at most `count`, whose bytes are within `room`."""
    return bisect.bisect_right(range(1, count + 1), room, key=nbytes)


def _part(program: Program) -> str:
    return "the engine" if program.layout.pipeline == 1 else f"stage {program.stage} of the engine"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
