"""The limits of an engine's steps and sequences, from the build options and the model's own."""

from __future__ import annotations

from llmc.errors import OptionError
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions
from llmc.program import Limits

# For a model that states no limit of its own (a plain module without a position table).
DEFAULT_MODEL_LEN = 4096


def engine_limits(info: ModelInfo, options: BuildOptions) -> Limits:
    """What the static buffers are made for. Raises OptionError for sequences longer than the model's positions."""
    longest = info.max_positions if options.max_model_len is None else options.max_model_len
    if longest is None:
        longest = DEFAULT_MODEL_LEN
    if info.max_positions is not None and longest > info.max_positions:
        raise OptionError(
            f"max_model_len is {longest}, but the model has {info.max_positions} positions",
            at=f"max_model_len={longest}",
            fix=f"give at most {info.max_positions}, or leave it out",
        )
    return Limits(
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        max_logit_rows=min(options.max_logit_rows, options.max_batch_tokens),
        max_model_len=longest,
        block_size=options.block_size,
    )
