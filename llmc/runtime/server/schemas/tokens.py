"""The bodies of POST /tokenize and POST /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field

from llmc.runtime.server.schemas.chat import MAX_MESSAGES, MAX_TOOLS, Message, Tool
from llmc.runtime.server.schemas.client_tools import functions_alone
from llmc.runtime.server.schemas.fields import Fields, Readable
from llmc.runtime.server.schemas.token_fields import TokenId


class TokenizeRequest(Readable, extra="forbid"):
    """A prompt, or messages that the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = Field(default=None, max_length=200_000)
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def readable(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return functions_alone(body)


class DetokenizeRequest(Fields, extra="forbid"):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]
