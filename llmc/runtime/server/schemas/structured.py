"""Which outputs are allowed: OpenAI's response_format, vLLM's structured_outputs and guided_* fields."""

from typing import Annotated, Any, Literal

from pydantic import Field

from llmc.runtime.server.schemas.fields import Fields

JsonSchema = dict[str, Any] | str
Choice = Annotated[str, Field(min_length=1, max_length=10_000)]


class JsonSchemaFormat(Fields, extra="forbid"):
    """OpenAI's json_schema object. The name and `strict` change nothing here: the schema always holds."""

    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool | None = None


class TextFormat(Fields, extra="forbid"):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields, extra="forbid"):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Fields, extra="forbid"):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields, extra="forbid", populate_by_name=True):
    """vLLM's field: exactly one of these is given."""

    json_schema: JsonSchema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(default=None, min_length=1, max_length=10_000)
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
