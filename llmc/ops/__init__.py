"""The llmc:: ops, one file each (or one family): importing this package registers them all with torch."""

from llmc.ops import (
    activation,
    attention,
    embedding,
    kv_cache,
    linear,
    norm,
    rope,
    sampling,
    select_channels,
    select_rows,
    token_codes,
    weight_codes,
)

__all__ = [
    "activation",
    "attention",
    "embedding",
    "kv_cache",
    "linear",
    "norm",
    "rope",
    "sampling",
    "select_channels",
    "select_rows",
    "token_codes",
    "weight_codes",
]
