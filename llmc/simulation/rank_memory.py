"""The memory of a rank, and the number of tokens that its KV cache has room for."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.triton.memory_fit import RESERVED_BYTES
from llmc.program import Launch, Program
from llmc.program.launch_arguments import Operand


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. weights, arena: bytes of its stage's weights and arena. kv_groups: bytes per token in the
    layers of each group of caches. logits: bytes of a step's rows. has: bytes that the rank has."""

    weights: int
    kv_groups: tuple[int, ...]
    arena: int
    logits: int
    has: int

    @property
    def fixed(self) -> int:
        """All bytes except those of the KV cache."""
        return self.weights + self.arena + self.logits + RESERVED_BYTES

    def cache(self, program: Program, blocks: int) -> int:
        """Bytes of `blocks` blocks in the first group, and of the corresponding blocks in the others."""
        size = program.limits.block_size
        return sum(size * count * kv for count, kv in zip(program.group_blocks(blocks), self.kv_groups, strict=True))

    def blocks(self, program: Program, wanted: int) -> int:
        """Number of blocks of the first group that fit, at most `wanted`."""
        return bisect.bisect_right(range(1, wanted + 1), self.has - self.fixed, key=lambda n: self.cache(program, n))

    def shortage(self, program: Program, blocks: int) -> str | None:
        """Describe what does not fit with this many blocks, and the number that would fit; None if they fit."""
        cache, size = self.cache(program, blocks), program.limits.block_size
        needed = self.fixed + cache
        if needed <= self.has:
            return None
        return (
            f"needs {needed / 1e9:.3f} GB per rank of {self.has / 1e9:.3f}: weights {self.weights / 1e9:.3f}, KV cache "
            f"of {blocks * size} tokens {cache / 1e9:.3f}, the rest {(self.fixed - self.weights) / 1e9:.3f}; "
            f"{self.blocks(program, blocks) * size or 'no'} tokens would fit"
        )


def rank_memory(program: Program, stages: Sequence[Sequence[Launch]], has: int) -> tuple[RankMemory, ...]:
    """The memory of a rank of each stage. has: bytes of one rank."""
    limits = program.limits
    weights = {slot.name: slot.nbytes for slot in program.weights}
    caches = {name.partition(".")[0]: slot for name, slot in program.cache_names().items()}
    arena = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
    memories = []
    for stage in stages:
        operands = [v for launch in stage for v in launch.arguments.values() if isinstance(v, Operand)]
        layers = {operand.name.partition(".")[0] for operand in operands if operand.space == "cache"}
        kv_groups = [0] * (1 + len(program.policies))
        for layer in layers:
            kv_groups[caches[layer].group] += caches[layer].bytes_per_block(limits.block_size) // limits.block_size
        own = {operand.name for operand in operands if operand.space == "weight"}
        logits = 4 * limits.max_logit_rows * program.vocab_size if stage is stages[-1] else 0
        used = sum(weights[name] for name in own)
        memories.append(RankMemory(used, tuple(kv_groups), arena, logits, has))
    return tuple(memories)
