"""The body of POST /v1/chat/completions: messages, tools, and how one is chosen."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmc.runtime.server.schemas.client_tools import functions_alone
from llmc.runtime.server.schemas.fields import Fields, Readable
from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.schemas.text_parts import Content, refuse_audio, text_of
from llmc.runtime.server.schemas.token_fields import number

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
# The function of an earlier call, possibly from another server.
MAX_NAME = 256
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionCall(Fields, extra="ignore"):
    """A call that the assistant made. arguments: JSON text."""

    name: str = Field(max_length=MAX_NAME)
    arguments: str = "{}"


class ToolCall(Fields, extra="ignore"):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields, extra="ignore"):
    """One turn. tool_call_id: which call a message of the role `tool` answers.

    reasoning, reasoning_content: what the assistant thought before its answer; two names for the same. refusal: in
    place of its content. function_call: OpenAI's older form of a tool call.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None

    def text(self) -> str | None:
        return None if self.content is None else text_of(self.content)


class FunctionDefinition(Fields, extra="allow"):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields, extra="allow"):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(Fields, extra="forbid"):
    """The name of a function."""

    name: str


class NamedTool(Fields, extra="forbid"):
    """tool_choice that forces one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(Readable, SamplingFields):
    """The body of /v1/chat/completions.

    chat_template: instead of the model's, where the server allows it. chat_template_kwargs: its variables.
    """

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = number("logprobs")
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = Field(default=None, max_length=200_000)
    chat_template_kwargs: dict[str, Any] | None = None

    include_reasoning: bool = True
    reasoning_effort: str | None = Field(default=None, max_length=64)
    return_prompt_text: bool | None = None
    modalities: Annotated[list[Literal["text"]], BeforeValidator(refuse_audio)] | None = None

    @classmethod
    def readable(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return functions_alone(body)

    # Ignored, which the answer says.
    prediction: dict[str, Any] | None = None
    store: bool | None = None
    verbosity: str | None = None
    moderation: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
