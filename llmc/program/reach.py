"""How far back layers look, which says how much of a sequence their caches hold: docs/windows.md."""

from dataclasses import dataclass

from llmc.program.limits import Limits

# Rows before a token's own that a tree may hide from it: it counts them in its window, and kernels read that far back.
TREE_REACH = 63
# Of the blocks behind those of one whole sequence, one of these goes with each so many.
_SHORTER = 8


@dataclass(frozen=True)
class Reach:
    """Of one group of layers. window: rows that a token sees, its own included. chunk: it sees none before the multiple
    of it at or before its own. None: no limit."""

    window: int | None
    chunk: int | None

    def __str__(self) -> str:
        sizes = (("window", self.window), ("chunk", self.chunk))
        return ", ".join(f"{name} {size}" for name, size in sizes if size is not None) or "everything"

    def first_row(self, position: int) -> int:
        """The first row that a token in this position, or behind it, sees."""
        by_window = 0 if self.window is None else position - self.window + 1
        by_chunk = 0 if self.chunk is None else position - position % self.chunk
        return max(0, by_window, by_chunk)

    def blocks_of_sequence(self, limits: Limits, tokens: int) -> int:
        """The most that one sequence holds while a step adds so many tokens to it."""
        sizes = [size for size in (self.window, self.chunk) if size is not None]
        rows = min([*sizes, limits.max_model_len]) - 1 + tokens
        # They may begin with the last row of a block.
        return min(limits.blocks_for(limits.max_model_len), limits.blocks_for(rows + limits.block_size - 1))

    def blocks_beside(self, limits: Limits, blocks: int) -> int:
        """Blocks for as many sequences of max_model_len as layers that see everything get `blocks` for, and, since most
        are shorter, at least an eighth of `blocks` but for the first sequence's, up to what all seats need: what a
        token of each sequence sees, with the rows that drafts may need, and once the tokens of a whole step."""
        whole, each = limits.blocks_for(limits.max_model_len), self.blocks_of_sequence(limits, 1 + TREE_REACH)
        of_longest = -(-blocks * each // whole)
        of_all = max(of_longest, min((blocks - whole) // _SHORTER, limits.max_sequences * each))
        return min(blocks, of_all + limits.blocks_for(limits.max_batch_tokens + TREE_REACH))


UNBOUNDED = Reach(None, None)
