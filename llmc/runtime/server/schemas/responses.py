"""The body of POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from llmc.runtime.server.schemas.chat import MAX_TOOLS, FunctionName
from llmc.runtime.server.schemas.client_tools import functions_alone
from llmc.runtime.server.schemas.fields import Fields, Readable
from llmc.runtime.server.schemas.foreign_items import readable_items
from llmc.runtime.server.schemas.response_items import InputItems
from llmc.runtime.server.schemas.structured import JsonObjectFormat, TextFormat
from llmc.runtime.server.schemas.token_fields import TokenFields, number


class FunctionTool(Fields, extra="allow"):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Fields, extra="forbid"):
    """A function by name: the one that has to be called, or one of those that may be."""

    type: Literal["function"]
    name: str


class AllowedTools(Fields, extra="forbid"):
    """Only these of the tools may be called, or one of them has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class SchemaTextFormat(Fields, extra="forbid"):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Fields, extra="allow"):
    """The form of the output's text."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaTextFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ReasoningConfig(Fields, extra="allow"):
    """The reasoning settings of a response.

    effort: for templates that use it; `none` turns thinking off. summary: ignored, because nothing summarizes.
    """

    effort: str | None = Field(default=None, max_length=64)
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Fields, extra="allow"):
    """Without effect: events are not padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Readable, TokenFields):
    """The body of /v1/responses.

    input: a text, or items. previous_response_id: a stored response whose conversation this one continues.
    """

    input: str | InputItems
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = True
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = Field(default=None, max_length=32)
    top_logprobs: int | None = number("logprobs")
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=64)

    @classmethod
    def readable(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        known, notes = functions_alone(body)
        if isinstance(known.get("input"), list):
            items, of_items = readable_items(known["input"])
            known, notes = {**known, "input": items}, [*notes, *of_items]
        return known, notes

    # Ignored, which the answer says.
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    moderation: dict[str, Any] | None = None
    background_options: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
