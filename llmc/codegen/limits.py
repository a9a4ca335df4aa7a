"""The limits of an engine's steps and sequences, from the build options and the model's own."""

from llmc.errors import OptionError
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions
from llmc.program import Limits, parse_compression

# For a model that states no limit (a plain module without a position table).
DEFAULT_MODEL_LEN = 4096
# Rows of logits that a step has room for unless the options say so: one for each sequence, also of few.
_LEAST_ROWS = 64
# And for this number of drafts of each, if drafts are expected or room for them is free.
_DRAFTS = 8


def engine_limits(info: ModelInfo, options: BuildOptions, *, rows_are_free: bool) -> Limits:
    """The limits that static buffers are sized for. rows_are_free: whether unused rows of logits take no memory.

    Raises OptionError as longest_sequence.
    """
    return Limits(
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        max_logit_rows=min(_logit_rows(options, rows_are_free), options.max_batch_tokens),
        max_model_len=longest_sequence(info, options),
        block_size=options.block_size,
    )


def longest_sequence(info: ModelInfo, options: BuildOptions) -> int:
    """Return the maximum number of tokens of a sequence.

    Raises OptionError for more than the model's positions, or than a step holds of texts that are read as a whole.
    """
    longest = options.max_model_len or info.max_positions or DEFAULT_MODEL_LEN
    policy = parse_compression(options.kv_compression)
    if policy.renumbers and info.max_positions is not None and policy.most_rows(longest) > info.max_positions:
        raise OptionError(
            f"positions within the cache reach {policy.most_rows(longest)}, but the model has {info.max_positions}",
            at=f"kv_compression={policy.shown}",
            fix=f"let budget and every add up to at most {info.max_positions}",
        )
    if info.max_positions is not None and longest > info.max_positions and not policy.renumbers:
        raise OptionError(
            f"max_model_len is {longest}, but the model has {info.max_positions} positions",
            at=f"max_model_len={longest}",
            fix=f"give at most {info.max_positions}, or leave it out",
        )
    if info.head is not None and info.head.whole_texts and longest > options.max_batch_tokens:
        if options.max_model_len is not None:
            raise OptionError(
                f"texts of {longest} tokens do not fit into a step of {options.max_batch_tokens}, and this model reads "
                "a text as a whole",
                at=f"max_batch_tokens={options.max_batch_tokens}",
                fix=f"give max_batch_tokens={longest} or more",
            )
        longest = options.max_batch_tokens
    return longest


def _logit_rows(options: BuildOptions, rows_are_free: bool) -> int:
    if options.max_logit_rows is not None:
        return options.max_logit_rows
    has_drafts = rows_are_free or options.speculative is not None
    return max(_LEAST_ROWS, options.max_sequences * (1 + _DRAFTS if has_drafts else 1))
