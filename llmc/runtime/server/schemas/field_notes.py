"""Fields of OpenAI's and vLLM's APIs that are not honoured: ignored with a warning in the answer, or refused."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

# These change no answer that this engine could give, so the request is served without them.
IGNORED: Mapping[str, str] = {
    "prediction": "the output is generated without it, which gives the same text",
    "store": "chat completions are not kept; /v1/responses keeps responses",
    "verbosity": "the model's template has no such setting",
    "thinking_token_budget": "thinking is only bounded by max_tokens",
    "stream_interval": "chunks are sent as they come",
    "repetition_detection": "repetition does not end the output",
    "watermarking": "outputs carry no watermark",
    "moderation": "nothing is moderated here",
    "vllm_xargs": "there are no extensions of vLLM here",
    "mm_processor_kwargs": "this engine reads text only",
    "media_io_kwargs": "this engine reads text only",
    "client_metadata": "it accounts for requests, which this server does not",
    "background_options": "there is no background mode",
    "context_management": "the context is only shortened by `truncation`",
    "max_tool_calls": "tools run at the client, which counts them",
}

# Without these the answer would be a wrong one.
REFUSED: Mapping[str, str] = {
    "functions": "it is OpenAI's older form of tools: send `tools`",
    "function_call": "it is OpenAI's older form of tool_choice: send `tools` and `tool_choice`",
    "audio": "this engine reads and writes text only",
    "web_search_options": "nothing is looked up on the web here",
    "prompt_embeds": "a prompt is text or token ids here",
    "logprob_token_ids": "log-probabilities are of the likeliest tokens: use logprobs and top_logprobs",
    "kv_transfer_params": "keys and values are not taken from other servers",
    "ec_transfer_params": "encoder caches are not taken from other servers",
    "conversation": "conversations are not kept: use previous_response_id, or send all items as input",
}


def warnings_of(body: BaseModel, *honoured: str) -> list[str]:
    """A sentence for each field that the request gives a value and that is ignored. honoured: on this route."""
    ignored = {name: getattr(body, name) for name in body.model_fields_set if name in IGNORED and name not in honoured}
    return [f"{name} is ignored: {IGNORED[name]}" for name, value in ignored.items() if is_given(value)]


def is_given(value: Any) -> bool:
    """Whether a value has an effect: null, false and empty values have none."""
    return value is not None and value is not False and value != {} and value != []
