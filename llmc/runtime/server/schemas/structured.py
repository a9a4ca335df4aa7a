"""Which outputs are allowed: OpenAI's response_format, vLLM's structured_outputs and guided_* fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonSchema = dict[str, Any] | str
Choice = Annotated[str, Field(min_length=1, max_length=10_000)]


class JsonSchemaFormat(BaseModel):
    """OpenAI's json_schema object. The name and `strict` change nothing here: the schema always holds."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class SchemaFormat(BaseModel):
    """JSON that a schema allows."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """vLLM's field: exactly one of these is given."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_schema: JsonSchema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(default=None, min_length=1, max_length=10_000)
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
