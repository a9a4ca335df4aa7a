"""Whether an engine fits its GPU's memory: weights, one full sequence of KV cache, and the arena."""

from __future__ import annotations

from llmc.errors import OptionError
from llmc.program import Program
from llmc.targets import GpuTarget, Target

# What the driver and the runtime take for themselves.
_RESERVED_BYTES = 1 << 30


def check_memory(program: Program, target: Target) -> None:
    """Raise OptionError with the arithmetic if a GPU cannot hold the engine and one sequence of full length."""
    if not isinstance(target, GpuTarget):
        return
    limits = program.limits
    weights = sum(slot.nbytes for slot in program.weights)
    blocks = -(-limits.max_model_len // limits.block_size)
    cache = blocks * sum(cache.bytes_per_block(limits.block_size) for cache in program.caches)
    arena = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
    logits = 4 * limits.max_logit_rows * program.vocab_size
    needed = weights + cache + arena + logits + _RESERVED_BYTES
    if needed > target.memory_bytes:
        raise OptionError(
            f"the engine needs {_gb(needed)}, and {target.name} has {_gb(target.memory_bytes)}: "
            f"weights {_gb(weights)} + KV cache of one sequence of {limits.max_model_len} tokens {_gb(cache)} + "
            f"arena {_gb(arena)} + logits {_gb(logits)} + {_gb(_RESERVED_BYTES)} for the driver",
            at=f"target={target.name}",
            fix="lower max_model_len or max_batch_tokens, choose kv_dtype or dtype of fewer bytes, or a larger GPU",
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
