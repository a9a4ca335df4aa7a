"""What a chat request's tools and tool_choice mean for its output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.runtime.grammar.grammar import Grammar
from llmc.runtime.server.chat_deltas import (
    AutoToolDeltas,
    ChatDeltas,
    ContentDeltas,
    NamedToolDeltas,
    RequiredToolDeltas,
)
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.sampling import grammar_of, json_schema
from llmc.runtime.server.schemas.chat import ChatRequest, NamedTool
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tool_calls import ToolCallReader, required_schema

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolPlan:
    """What tool_choice means for a request.

    grammar: what the output is held to, None for nothing. reader: makes the deltas of a choice. shows_tools: whether
    the template is told of the tools. keeps_special: calls may be marked by special tokens, which are to be seen.
    """

    grammar: Grammar | None
    reader: Callable[[], ChatDeltas]
    shows_tools: bool
    keeps_special: bool = False


def tool_plan(model: ServedModel, body: ChatRequest) -> ToolPlan:
    """Read tools, tool_choice and response_format; 400 where they contradict each other."""
    tools = body.tools or []
    choice = body.tool_choice if body.tool_choice is not None else ("auto" if tools else "none")
    functions = {tool.function.name: tool.function.parameters or ANY_ARGUMENTS for tool in tools}
    if choice == "none":
        return ToolPlan(grammar_of(body), ContentDeltas, shows_tools=False)
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if len(functions) < len(tools):
        raise bad_request("two tools have the same name", "tools")
    if choice == "auto":
        names, single = frozenset(functions), body.parallel_tool_calls is False
        marked = any(model.texts.is_special(opening) for opening in model.tool_form.openings)
        return ToolPlan(
            grammar_of(body),
            lambda: AutoToolDeltas(ToolCallReader(model.tool_form, names), single),
            shows_tools=True,
            keeps_special=marked,
        )
    if grammar_of(body) is not None:
        raise bad_request("a forced tool call cannot be combined with another constraint", "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise bad_request(f"tool_choice names {name!r:.80}, which is not among the tools", "tool_choice")
        return ToolPlan(json_schema(functions[name], "tools"), lambda: NamedToolDeltas(name), shows_tools=True)
    most = 1 if body.parallel_tool_calls is False else None
    grammar, known = json_schema(required_schema(functions, most), "tools"), frozenset(functions)
    return ToolPlan(grammar, lambda: RequiredToolDeltas(known), shows_tools=True)
