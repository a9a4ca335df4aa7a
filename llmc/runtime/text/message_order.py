"""Messages in another order or number, for templates that take them so: nothing that was said is left out."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from llmc.runtime.text.normal_messages import Json

_SYSTEM = ("system", "developer")


def with_system(messages: Sequence[Json], text: str) -> list[Json]:
    """Add a text to the system message at the beginning, or as a new system message."""
    said = {"role": "system", "content": text}
    if not messages or messages[0].get("role") not in _SYSTEM:
        return [said, *messages]
    return [_joined([messages[0], said]), *messages[1:]]


def systems_first(messages: Sequence[Json]) -> list[Json]:
    """A single system message before all others, with the contents of all of them."""
    said = [message for message in messages if message.get("role") in _SYSTEM]
    others = [message for message in messages if message.get("role") not in _SYSTEM]
    return [{**_joined(said), "role": "system"}, *others] if said else others


def systems_in_user(messages: Sequence[Json]) -> list[Json]:
    """The system's message at the beginning becomes the beginning of the user's first message."""
    if not messages or messages[0].get("role") not in _SYSTEM:
        return [*messages]
    system = {**messages[0], "role": "user"}
    if len(messages) > 1 and messages[1].get("role") == "user":
        return [_joined([system, messages[1]]), *messages[2:]]
    return [system, *messages[1:]]


def alternating(messages: Iterable[Json], filler: str) -> list[Json]:
    """User and assistant messages alternately, the user first: neighbours of one role are joined, and a missing turn is
    filled.

    Messages of the system, of tools, and those with calls do not count as turns.
    """
    found: list[Json] = []
    last = "assistant"
    for message in messages:
        role = message.get("role")
        if not _is_turn(message):
            found.append(message)
            continue
        if role == last and found and _is_turn(found[-1]):
            found[-1] = _joined([found[-1], message])
            continue
        if role == last:
            found.append({"role": "user" if role == "assistant" else "assistant", "content": filler})
        found.append(message)
        last = str(role)
    return found


def texts_before_calls(messages: Iterable[Json]) -> list[Json]:
    """A message with a text and calls is two: what was said, then what was called and thought before."""

    found: list[Json] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            found.append({name: message[name] for name in message if name not in ("tool_calls", "reasoning_content")})
            found.append({**message, "content": ""})
        else:
            found.append(message)
    return found


def one_call_each(messages: Sequence[Json]) -> list[Json]:
    """Split a message with several calls into one per call, each followed by the result of its call."""
    found: list[Json] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = list(takewhile(lambda each: each.get("role") == "tool", waiting))
        del waiting[: len(results)]
        for index, call in enumerate(calls):
            kept = message if index == 0 else {"role": message["role"], "content": ""}
            own = next((each for each in results if each.get("tool_call_id") == call["id"]), None)
            found += [{**kept, "tool_calls": [call]}, *([] if own is None else [own])]
            results = [each for each in results if each is not own]
        found += results
    return found


def _is_turn(message: Json) -> bool:
    return message.get("role") == "user" or (message.get("role") == "assistant" and not message.get("tool_calls"))


def _joined(messages: Sequence[Json]) -> Json:
    """The first message with the contents of all of them, and their thoughts."""
    contents = [message["content"] for message in messages]
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    found = {**messages[0], "content": _joined_contents(contents)}
    return {**found, "reasoning_content": "\n\n".join(thoughts)} if thoughts else found


def _joined_contents(contents: Sequence[Any]) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    parts: list[Any] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts
