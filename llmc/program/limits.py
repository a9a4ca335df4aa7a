"""What an engine's static buffers allow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Tokens, requests and logit rows a step, tokens a sequence, positions a block."""

    max_batch_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_model_len: int
    block_size: int

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many."""
        return -(-tokens // self.block_size)
