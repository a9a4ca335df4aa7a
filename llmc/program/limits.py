"""The limits of an engine's static buffers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Tokens, requests and logit rows per step, tokens per sequence, positions per block."""

    max_batch_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_model_len: int
    block_size: int

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)
