"""What a rank keeps in its memory, and how many tokens of KV cache are left room for."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.triton.memory_fit import RESERVED_BYTES
from llmc.program import Launch, Program
from llmc.program.launch_arguments import Operand


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. weights, kv_token, arena: of its stage. logits: of a step's rows. has: that there are."""

    weights: int
    kv_token: int
    arena: int
    logits: int
    has: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.arena + self.logits + RESERVED_BYTES

    def tokens(self, block_size: int) -> int:
        """Of KV cache that there is room for, in whole blocks."""
        block = self.kv_token * block_size
        return max(0, self.has - self.fixed) // block * block_size if block else 1 << 40

    def shortage(self, tokens: int, block_size: int) -> str | None:
        """What does not fit if there is to be room for so many tokens, and what does; None if all of it does."""
        needed = self.fixed + tokens * self.kv_token
        if needed <= self.has:
            return None
        return (
            f"needs {needed / 1e9:.3f} GB a rank of {self.has / 1e9:.3f}: weights {self.weights / 1e9:.3f}, KV cache "
            f"of {tokens} tokens {tokens * self.kv_token / 1e9:.3f}, the rest {(self.fixed - self.weights) / 1e9:.3f}; "
            f"{self.tokens(block_size) or 'no'} tokens would fit"
        )


def rank_memory(program: Program, stages: Sequence[Sequence[Launch]], has: int) -> tuple[RankMemory, ...]:
    """Of a rank of each stage. has: bytes of one rank."""
    limits = program.limits
    weights = {slot.name: slot.nbytes for slot in program.weights}
    caches = {name.partition(".")[0]: slot for name, slot in program.cache_names().items()}
    arena = program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows)
    found = []
    for stage in stages:
        operands = [v for launch in stage for v in launch.arguments.values() if isinstance(v, Operand)]
        layers = {operand.name.partition(".")[0] for operand in operands if operand.space == "cache"}
        per_block = sum(caches[layer].bytes_per_block(limits.block_size) for layer in layers)
        own = {operand.name for operand in operands if operand.space == "weight"}
        logits = 4 * limits.max_logit_rows * program.vocab_size if stage is stages[-1] else 0
        used = sum(weights[name] for name in own)
        found.append(RankMemory(used, per_block // limits.block_size, arena, logits, has))
    return tuple(found)
