"""Messages as clients write them, in one form: texts whole, calls with ids, results with the name of their function."""

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]

# The keys of the assistant's thoughts in clients and templates; the first is the one here.
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")


def normal_messages(messages: Iterable[Mapping[str, Any]]) -> list[Json]:
    """The messages with a `content` each, which is a text unless it has parts other than text.

    Calls are under `tool_calls` and their results have the role `tool`, `tool_call_id` and, where it is known, `name`:
    OpenAI's older `function_call` and role `function` included. A thought is under `reasoning_content`. Keys whose
    value is None and empty lists of calls are left out. Other keys stay.
    """
    normalized: list[Json] = []
    open_calls = _OpenCalls()
    for message in messages:
        normal = {name: value for name, value in message.items() if value is not None}
        normal["content"] = _content(normal)
        thoughts = [normal[name] for name in THOUGHT_NAMES if isinstance(normal.get(name), str)]
        normal = {name: value for name, value in normal.items() if name not in (*THOUGHT_NAMES, "refusal")}
        if any(thoughts):
            normal["reasoning_content"] = next(filter(None, thoughts))
        if normal.get("role") in ("tool", "function"):
            normal = open_calls.answered(normal)
        calls = _calls(normal)
        normal = {name: value for name, value in normal.items() if name not in ("tool_calls", "function_call")}
        if calls:
            normal["tool_calls"] = open_calls.made(calls)
        normalized.append(normal)
    return normalized


def text_of_parts(content: list[Any]) -> str | None:
    """The text of a list of parts; None if one of them is something else."""
    texts = [_text_of_part(part) for part in content]
    return None if any(text is None for text in texts) else "".join(text for text in texts if text is not None)


class _OpenCalls:
    """The calls of a conversation that have no result yet, in order."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []
        self._names: dict[str, str] = {}

    def made(self, calls: Iterable[Mapping[str, Any]]) -> list[Json]:
        """The calls of a message, with ids for those without."""
        completed = []
        for call in calls:
            identity, function = str(call.get("id") or f"call_{self._count}"), dict(call["function"])
            self._count += 1
            self._names[identity] = str(function.get("name") or "")
            self._open.append((identity, self._names[identity]))
            completed.append({**call, "id": identity, "type": call.get("type") or "function", "function": function})
        return completed

    def answered(self, message: Json) -> Json:
        """A result with the id and the name of its call: by its id, by its name, or else the first without a result."""
        identity, name = message.get("tool_call_id"), message.get("name")
        if identity is None:
            fitting = [pending for pending in self._open if name in (None, pending[1])]
            identity, name = fitting[0] if fitting else (None, name)
        self._open = [pending for pending in self._open if pending[0] != identity]
        name = name or self._names.get(identity or "")
        known = {"tool_call_id": identity, "name": name}
        return {**message, "role": "tool", **{key: value for key, value in known.items() if value is not None}}


def _content(message: Mapping[str, Any]) -> Any:
    """The text of a message; a list with parts other than text stays a list."""
    content = message.get("content", message.get("refusal", ""))
    if not isinstance(content, list):
        return content
    text = text_of_parts(content)
    return content if text is None else text


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    return text if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str) else None


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a message, in the newer or the older form, and those that have the function's fields themselves."""
    calls = list(message.get("tool_calls") or ())
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [{"type": "function", "function": message["function_call"]}]
    return [
        call if isinstance(call.get("function"), Mapping) else {"id": call.get("id"), "function": _inner(call)}
        for call in calls
    ]


def _inner(call: Mapping[str, Any]) -> Json:
    return {name: value for name, value in call.items() if name not in ("id", "type")}
