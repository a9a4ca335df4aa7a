"""Fields shared by completions and chat, except those of token choice."""

from typing import Literal

from pydantic import Field

from llmc.runtime.server.schemas.fields import Fields
from llmc.runtime.server.schemas.structured import JsonSchema, ResponseFormat, StructuredOutputs
from llmc.runtime.server.schemas.token_fields import TokenFields, number


class StreamOptions(Fields, extra="forbid"):
    """Options of a streamed answer.

    include_usage: a last chunk with token counts. continuous_usage_stats: counts in every chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(TokenFields):
    """Number, length, form and reported details of choices."""

    max_tokens: int | None = number("max_tokens")
    n: int | None = number("n", 1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**31)
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool = False
    length_penalty: float = number("length_penalty", 1.0)
    prompt_logprobs: int | None = number("prompt_logprobs")
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, max_length=10_000)
    guided_grammar: str | None = None
