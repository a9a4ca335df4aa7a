"""A conversation in the form that a chat template takes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.runtime.text.conversation_form import Absent, Arguments, Calls, ConversationForm, Ids, Systems, Tools
from llmc.runtime.text.message_order import (
    alternating,
    one_call_each,
    systems_first,
    systems_in_user,
    texts_before_calls,
    with_system,
)
from llmc.runtime.text.normal_messages import Json
from llmc.runtime.text.tool_text import (
    EXAMPLE_ARGUMENTS,
    EXAMPLE_NAME,
    calls_like,
    calls_text,
    result_text,
    tools_text,
)

# Takes the place of a text that may not be missing.
FILLER = "..."
# The length that Mistral's templates require of call ids.
_SHORT_ID = 9


def formed(
    messages: Sequence[Json], tools: Sequence[Mapping[str, Any]] | None, form: ConversationForm
) -> dict[str, Any]:
    """The template's variables `messages` and `tools`. messages: as normal_messages makes them."""
    shaped = [*messages]
    writes_calls = form.calls is not Calls.AS_TEXT and (bool(tools) or not form.calls_need_tools)
    if tools and form.tools is Tools.DESCRIBED:
        example = form.call_example or calls_text([(EXAMPLE_NAME, EXAMPLE_ARGUMENTS)], form.call_style)
        shaped, tools = with_system(shaped, tools_text(tools, example, results_as_text=not form.results)), None
    if not writes_calls:
        shaped = [_with_calls_as_text(message, form) for message in shaped]
    elif form.calls is Calls.ONE_EACH:
        shaped = one_call_each(shaped)
    if not form.calls_with_text:
        shaped = texts_before_calls(shaped)
    if not form.results:
        shaped = [_with_result_of_user(message) for message in shaped]
    if not form.developer:
        shaped = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in shaped]
    if form.systems is not Systems.ANYWHERE:
        shaped = systems_first(shaped)
    if form.systems is Systems.IN_USER:
        shaped = systems_in_user(shaped)
    if form.alternates:
        shaped = alternating(shaped, FILLER)
    shown = [_message(message, form) for message in _named(shaped, form)]
    return {"messages": shown, "tools": None, form.tools_name: _tools(tools, form)}


def _with_calls_as_text(message: Json, form: ConversationForm) -> Json:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(function.get("name", ""), _object(function.get("arguments"))) for function in functions]
    text = None if form.call_example is None else calls_like(form.call_example, calls)
    text, content = text or calls_text(calls, form.call_style), message["content"]
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    else:
        content = f"{content}\n{text}" if content else text
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _with_result_of_user(message: Json) -> Json:
    if message.get("role") != "tool":
        return message
    content = message["content"]
    return {"role": "user", "content": result_text(content if isinstance(content, str) else _json(content))}


def _named(messages: Sequence[Json], form: ConversationForm) -> list[Json]:
    """Replace the ids of calls by ids that the template accepts. A result gets the new id of the last call with its old
    id."""
    ids: dict[Any, str] = {}
    named, count = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = _identity(call, count, form)
            calls.append({**call, "id": ids[call["id"]]})
            count += 1
        answered = message.get("tool_call_id")
        changes: Json = {"tool_calls": calls} if calls else {}
        changes |= {} if answered is None else {"tool_call_id": ids.get(answered, answered)}
        named.append({**message, **changes})
    return named


def _identity(call: Json, count: int, form: ConversationForm) -> str:
    identity: str = call["id"]
    if form.ids is Ids.NAMED and call["function"].get("name", "") not in identity:
        return f"functions.{call['function']['name']}:{count}"
    if form.ids is not Ids.SHORT or (len(identity) == _SHORT_ID and identity.isalnum()):
        return identity
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID]


def _message(message: Json, form: ConversationForm) -> Json:
    """Return the message with the names and kinds of values of the form."""
    thought, content, calls = message.get("reasoning_content"), message["content"], message.get("tool_calls")
    shaped = {name: value for name, value in message.items() if name != "reasoning_content"}
    if thought and calls and content and not form.thought_with_text:
        thought = None
    in_parts = thought if form.thought == "parts" else None
    if message.get("role") == "assistant" and not (content or calls or in_parts or form.blanks):
        content = FILLER
    if calls:
        shaped["tool_calls"] = [_call(call, form) for call in calls]
    if in_parts:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        shaped["content"] = [{"type": "thinking", "thinking": in_parts}, *parts]
    elif calls and not content and form.absent is not Absent.EMPTY:
        shaped["content"] = None
        if form.absent is Absent.LEFT_OUT:
            del shaped["content"]
    elif message.get("role") in form.parts and isinstance(content, str):
        shaped["content"] = [{"type": "text", "text": content}]
    else:
        shaped["content"] = content
    return {**shaped, form.thought: thought} if thought and not in_parts else shaped


def _call(call: Json, form: ConversationForm) -> Json:
    function = call["function"]
    arguments = function.get("arguments")
    value = _object(arguments)
    if not isinstance(value, dict) and not form.raw_arguments:
        value = {"arguments": arguments if isinstance(arguments, str) else _json(arguments)}
    if not isinstance(value, dict):
        value = value if isinstance(value, str) else _json(value)
    elif form.arguments is Arguments.TEXT:
        value = arguments if isinstance(arguments, str) and arguments.strip() not in ("", "null") else _json(value)
    elif form.arguments is not Arguments.OBJECT:
        value = {name: _as_text(argument, form.arguments) for name, argument in value.items()}
    return {**call, "function": {**function, "arguments": value}}


def _as_text(value: Any, arguments: Arguments) -> Any:
    keeps = value is not None if arguments is Arguments.WITHOUT_NULL else isinstance(value, str)
    return value if keeps else _json(value)


def _object(arguments: Any) -> Any:
    """Arguments as an object; what is none is the text that it was."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value if isinstance(value, dict) else arguments


def _tools(tools: Sequence[Mapping[str, Any]] | None, form: ConversationForm) -> list[Json] | None:
    if not tools:
        return [] if form.lists_no_tools else None
    shaped = [dict(tool) for tool in tools]
    if form.fills_tools:
        shaped = [{**tool, "function": _filled(tool["function"])} if "function" in tool else tool for tool in shaped]
    return [dict(tool.get("function", tool)) for tool in shaped] if form.tools is Tools.FUNCTIONS else shaped


def _filled(function: Mapping[str, Any]) -> Json:
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **function}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
