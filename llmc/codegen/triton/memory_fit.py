"""Whether an engine fits its GPU's memory: weights, the KV cache that was asked for, the arena and the logits."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import OptionError
from llmc.options import BuildOptions
from llmc.program import Program
from llmc.targets import GpuTarget

# What the driver and the runtime take for themselves.
RESERVED_BYTES = 1 << 30


@dataclass(frozen=True)
class _Needs:
    """Bytes. sequence: of the KV cache of one sequence of max_model_len tokens."""

    weights: int
    sequence: int
    arena: int
    logits: int

    @property
    def fixed(self) -> int:
        """Without any KV cache."""
        return self.weights + self.arena + self.logits + RESERVED_BYTES


def check_memory(program: Program, target: GpuTarget, options: BuildOptions) -> None:
    """Raise OptionError with the arithmetic if a GPU cannot hold the engine and the sequences that were asked for.

    Those are max_sequences of max_model_len tokens where the options name both; else one, since the defaults promise
    no more: a step then serves as many requests as there is room for.
    """
    limits, needs = program.limits, _needs(program)
    count = limits.max_sequences if {"max_sequences", "max_model_len"} <= options.model_fields_set else 1
    if options.max_model_len is None:
        count = 1
    cache = count * needs.sequence
    needed = needs.fixed + cache
    if needed > target.memory_bytes:
        sequences = "one sequence" if count == 1 else f"{count} sequences"
        fits = fitting_sequences(program, target)
        lower = "max_sequences, " if count > 1 else ""
        advice = f"at most {fits} of that length fit: " if count > 1 and fits else ""
        raise OptionError(
            f"the engine needs {_gb(needed)}, and {target.name} has {_gb(target.memory_bytes)}: "
            f"weights {_gb(needs.weights)} + KV cache of {sequences} of {limits.max_model_len} tokens {_gb(cache)} + "
            f"arena {_gb(needs.arena)} + logits {_gb(needs.logits)} + {_gb(RESERVED_BYTES)} for the driver",
            at=f"target={target.name}",
            fix=f"{advice}lower {lower}max_model_len or max_batch_tokens, choose kv_dtype or dtype of fewer bytes, or "
            "a larger GPU",
        )


def fitting_sequences(program: Program, target: GpuTarget) -> int:
    """How many sequences of max_model_len tokens the GPU holds beside the engine, up to max_sequences."""
    needs = _needs(program)
    room = max(0, target.memory_bytes - needs.fixed)
    return min(program.limits.max_sequences, room // needs.sequence if needs.sequence else program.limits.max_sequences)


def _needs(program: Program) -> _Needs:
    limits = program.limits
    blocks = -(-limits.max_model_len // limits.block_size)
    return _Needs(
        weights=sum(slot.nbytes for slot in program.weights),
        sequence=blocks * sum(cache.bytes_per_block(limits.block_size) for cache in program.caches),
        arena=program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows),
        logits=4 * limits.max_logit_rows * program.vocab_size,
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
