"""A tiny model as a GGUF file with every type of blocks that engines keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from tests.gguf_families import family_model
from tests.gguf_files import write_gguf

# By patterns of names in the file.
EVERY_BLOCK = {
    **{"attn_q": "Q4_1", "attn_k": "Q5_1", "attn_v": "Q2_K", "attn_o": "IQ4_NL", "token_embd": "Q6_K"},
    **{"ffn_gate": "Q4_K", "ffn_up": "Q4_K", "0.ffn_down": "Q3_K", "1.ffn_down": "Q5_K", "output": "IQ4_XS"},
}
# What divides into super-blocks of 256.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "attention_bias": False}


def write_every_block(
    path: Path, *, add: Callable[[gguf.GGUFWriter], None] = lambda writer: None, **overrides: Any
) -> Any:
    """The model with the weights that the file stands for."""
    model = family_model("llama", **WIDE, **overrides)
    model.load_state_dict(write_gguf(path, model, "Q8_0", kinds=EVERY_BLOCK, add=add), strict=False)
    return model
