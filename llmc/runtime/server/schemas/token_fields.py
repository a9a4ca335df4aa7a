"""The fields that every generating route takes: how tokens are chosen, and vLLM's additions to OpenAI's."""

from typing import Annotated, Any

from pydantic import Field

from llmc.runtime.sampling.sampling_table import SAMPLING_NUMBERS
from llmc.runtime.server.schemas.fields import Fields

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
ShortText = Annotated[str, Field(min_length=1, max_length=200)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


def number(name: str, default: Any = None) -> Any:
    """The field of a number of the table of sampling parameters."""
    return Field(default=default, **SAMPLING_NUMBERS[name].bounds())


class TokenFields(Fields, extra="forbid", populate_by_name=True):
    """None means the server's default, which the model's generation_config.json sets where it does."""

    model: str | None = Field(default=None, max_length=1000)
    temperature: float | None = number("temperature")
    top_p: float | None = number("top_p")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: int | None = number("seed")
    presence_penalty: float | None = number("presence_penalty")
    frequency_penalty: float | None = number("frequency_penalty")
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=1024)

    top_k: int | None = number("top_k")
    min_p: float | None = number("min_p")
    typical_p: float | None = number("typical_p")
    repetition_penalty: float | None = number("repetition_penalty")
    dry_multiplier: float | None = number("dry_multiplier")
    dry_base: float | None = number("dry_base")
    dry_allowed_length: int | None = number("dry_allowed_length")
    dry_penalty_last_n: int | None = number("dry_penalty_last_n")
    dry_sequence_breakers: list[ShortText] | None = Field(default=None, max_length=64)
    bad_words: list[ShortText] | None = Field(default=None, max_length=1024)
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    min_tokens: int = number("min_tokens", 0)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # Without effect: fast tokenizers' decoders put no spaces between special tokens.
    spaces_between_special_tokens: bool = True
    kv_compression: ShortText | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    deadline_seconds: float | None = Field(default=None, gt=0.0, le=86_400.0)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    request_id: str | None = Field(default=None, max_length=128)
    service_tier: str | None = None

    # Accounting fields of OpenAI and vLLM, which do not affect answers.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # Ignored, which the answer says.
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
