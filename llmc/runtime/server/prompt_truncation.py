"""Prompts cut to a length: vLLM's truncate_prompt_tokens and truncation_side."""

from functools import partial
from typing import NamedTuple

from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.schemas.completion import CompletionRequest
from llmc.runtime.server.schemas.embeddings import RowFields
from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tokenizing import check_text

# A text that is only counted, or whose turns are dropped, may be longer than a prompt that is continued.
MOST_CONTEXTS = 16
# The fix for a text that is too long.
CUT_IT = "shorten it, or have it cut by truncate_prompt_tokens"


class ReadPrompt(NamedTuple):
    """Token ids of a prompt's text, and whether they are of the whole text."""

    ids: list[int]
    is_whole: bool


async def read_text(
    model: ServedModel, text: str, fields: ChatRequest | CompletionRequest, max_tokens: int | None
) -> ReadPrompt:
    """A prompt's text, truncated as requested. Raises ContextLengthError for one too long that is not to be cut."""
    if fields.truncate_prompt_tokens is None:
        return ReadPrompt(await model.tokenize(text, fields.add_special_tokens, fix=CUT_IT), True)
    check_text(text, "prompt")
    part = readable_part(model, fields, text)
    encode = partial(model.engine.engine.tokenizer.encode, add_special_tokens=fields.add_special_tokens)
    (tokens,) = await model.tokenizing.of_all([part], encode)
    ids = truncated(model, tokens, fields, max_tokens)
    return ReadPrompt(ids, len(part) == len(text) and len(ids) == len(tokens))


def readable_part(model: ServedModel, fields: SamplingFields | RowFields, text: str) -> str:
    """The characters of a text to be cut that the tokens of the longest prompt can have; others are dropped."""
    characters = model.max_model_len * model.tokenizing.longest_token
    return text[:characters] if fields.truncation_side == "right" else text[-characters:]


def truncated(model: ServedModel, ids: list[int], fields: SamplingFields, max_tokens: int | None) -> list[int]:
    """The last (or with truncation_side `right` the first) tokens that the request keeps.

    -1 keeps the number of tokens that leaves room for max_tokens of output. 400 for 0.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        raise bad_request("truncate_prompt_tokens is -1 or at least 1", "truncate_prompt_tokens")
    if most < 0:
        most = max(1, model.max_model_len - (max_tokens or 1))
    return ids[:most] if fields.truncation_side == "right" else ids[-most:]
