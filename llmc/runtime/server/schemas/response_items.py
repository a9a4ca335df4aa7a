"""The items that POST /v1/responses takes as input: messages, function calls with their outputs, reasoning."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from llmc.runtime.server.schemas.chat import MAX_NAME
from llmc.runtime.server.schemas.fields import Fields
from llmc.runtime.server.schemas.foreign_items import READ
from llmc.runtime.server.schemas.text_parts import TEXT_ONLY, Content, text_of

MAX_ITEMS = 10_000


class MessageItem(Fields, extra="ignore"):
    """A turn, as the client writes it, or as it was in an earlier response's output."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""

    def text(self) -> str:
        return text_of(self.content)


class FunctionCallItem(Fields, extra="ignore"):
    """A call that the assistant made. arguments: JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(max_length=MAX_NAME)
    arguments: str = "{}"


def _content_of(output: Any) -> Any:
    """The content in older clients' form, an object that also has the success of the call."""
    return output.get("content", "") if isinstance(output, dict) else output


class FunctionCallOutputItem(Fields, extra="ignore"):
    """The function's result for the call with that id."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Content, BeforeValidator(_content_of)] = ""


class ReasoningText(Fields, extra="ignore"):
    """Text of a reasoning item or of its summary."""

    text: str = ""


class ReasoningItem(Fields, extra="ignore"):
    """The assistant's thoughts before the items that follow."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)
    summary: list[ReasoningText] = Field(default_factory=list)

    def text(self) -> str:
        """The thoughts, or else their summary."""
        return "".join(part.text for part in self.content or self.summary)


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


def _known(item: Any) -> Any:
    kind = _kind(item)
    if isinstance(kind, str) and kind not in READ:
        raise PydanticCustomError(
            TEXT_ONLY,
            "input items of type {type} are not supported: use message, function_call, function_call_output, reasoning",
            {"type": f"{kind:.60}"},
        )
    return item


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
    BeforeValidator(_known),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
