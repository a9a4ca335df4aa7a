"""Tools, calls and their results as text, for chat templates that have no place for them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_PROMPT = """You may call functions. Each line between these tags describes one in JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in this form, once for each call:
{call}
{results}"""
_RESULTS = "The result of a call comes between <tool_response> and </tool_response>."

# The names in the example call of the prompt.
EXAMPLE_NAME = "NAME"
EXAMPLE_ARGUMENTS: Mapping[str, str] = {"ARGUMENT": "VALUE"}


class CallBody(Enum):
    """The text between the marks of a call: a JSON object, a list of such, or Python's way to write a list of calls."""

    OBJECT = "object"
    LIST = "list"
    PYTHON = "python"


@dataclass(frozen=True)
class CallStyle:
    """How a model writes calls in its text. LIST and PYTHON have all calls of a message between the marks."""

    opening: str
    closing: str
    body: CallBody


HERMES = CallStyle("<tool_call>\n", "\n</tool_call>", CallBody.OBJECT)
# Templates that teach a form but take calls as text: Granite's and LFM2's.
_BY_MARK: Mapping[str, CallStyle] = {
    "<|tool_list_start|>": CallStyle("<|tool_call_start|>", "<|tool_call_end|>", CallBody.PYTHON),
    "<|tool_call|>": CallStyle("<|tool_call|>", "", CallBody.LIST),
}


def call_style(source: str) -> CallStyle:
    """The style that a template's text names; Hermes' where it names none."""
    return next((style for mark, style in _BY_MARK.items() if mark in source and "<tool_call>" not in source), HERMES)


def tools_text(tools: Sequence[Mapping[str, Any]], example: str, *, results_as_text: bool) -> str:
    """The system's text about tools and how to call them. example: a call. results_as_text: whether results are written
    by result_text."""
    lines = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    return _PROMPT.format(tools=lines, call=example, results=_RESULTS if results_as_text else "").rstrip()


def calls_text(calls: Sequence[tuple[str, Any]], style: CallStyle) -> str:
    """Calls as the model writes them: the name and the arguments of each, an object or a text that is none."""
    if style.body is CallBody.PYTHON:
        return f"{style.opening}[{', '.join(_python(*call) for call in calls)}]{style.closing}"
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    bodies: list[Any] = [objects] if style.body is CallBody.LIST else objects
    return "\n".join(f"{style.opening}{_json(body)}{style.closing}" for body in bodies)


def calls_like(example: str, calls: Sequence[tuple[str, Any]]) -> str | None:
    """Calls in the form of the example; None if its arguments are not a JSON object."""
    before, arguments, after = example.partition(_json(EXAMPLE_ARGUMENTS))
    if not arguments:
        return None
    return "\n".join(f"{before.replace(EXAMPLE_NAME, name)}{_json(given)}{after}" for name, given in calls)


def result_text(content: str) -> str:
    """The result of a call as text."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _python(name: str, arguments: Any) -> str:
    values = arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]
    return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in values)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
