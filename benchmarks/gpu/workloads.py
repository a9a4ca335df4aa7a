"""The steps of whole models that are measured, and the least they must move and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROUNDS = 5
DECODE_STEPS = 16


@dataclass(frozen=True)
class Decode:
    """Decode steps of `batch` sequences with `context` tokens each."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Prefill:
    """One prompt from nothing to its first token."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}"


# What matters most comes first: a time limit cuts from the end.
DECODES = (Decode(1, 1024), Decode(32, 1024), Decode(1, 8192), Decode(32, 8192))
PREFILLS = (Prefill(512), Prefill(8192))
MAX_MODEL_LEN = 8192 + (ROUNDS + 2) * DECODE_STEPS + 144


def matrix_elements(config: dict[str, Any]) -> int:
    """Elements of all matrices that every token is multiplied with, the output matrix included."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = 2 * hidden * heads * head + 2 * hidden * kv_heads * head + 3 * hidden * inner
    return int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def decode_bytes(config: dict[str, Any], work: Decode) -> int:
    """Of bf16 weights read once and of the KV cache read once, a step."""
    cache = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(2 * (matrix_elements(config) + cache * work.batch * work.context))


def prefill_flops(config: dict[str, Any], work: Prefill) -> int:
    """Of the products with weights (the output matrix for one row) and of causal attention."""
    head = config["vocab_size"] * config["hidden_size"]
    attention = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * work.tokens**2
    return int(2 * (matrix_elements(config) - head) * work.tokens + 2 * head + 2 * attention)
