"""Prompts cut to a length: vLLM's truncate_prompt_tokens and truncation_side."""

from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.schemas.text_rows import RowFields
from llmc.runtime.server.served_model import ServedModel

# Of a text that is cut, or only counted, more may be read than can be continued.
MOST_CONTEXTS = 16


def longest_text(model: ServedModel, fields: SamplingFields | RowFields) -> int:
    """How many tokens a prompt's text may have before it is cut."""
    return model.max_model_len * (1 if fields.truncate_prompt_tokens is None else MOST_CONTEXTS)


def truncated(model: ServedModel, ids: list[int], fields: SamplingFields, max_tokens: int | None) -> list[int]:
    """The last (or with truncation_side `right` the first) tokens that the request asks for.

    -1 asks for as many as leave room for max_tokens of output. 400 for 0.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        raise bad_request("truncate_prompt_tokens is -1 or at least 1", "truncate_prompt_tokens")
    if most < 0:
        most = max(1, model.max_model_len - (max_tokens or 1))
    return ids[:most] if fields.truncation_side == "right" else ids[-most:]
