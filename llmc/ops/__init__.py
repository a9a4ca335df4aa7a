"""The llmc:: ops, one file each (or one family): importing this package registers them all with torch."""

from llmc.ops import (
    attention,
    embedding,
    gated_activation,
    kv_write,
    layer_norm,
    linear,
    rms_norm,
    rope,
    sampling,
    select_channels,
    select_rows,
    token_codes,
    weight_codes,
)

__all__ = [
    "attention",
    "embedding",
    "gated_activation",
    "kv_write",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "sampling",
    "select_channels",
    "select_rows",
    "token_codes",
    "weight_codes",
]
