"""Messages in another order or number, for templates that take them so: nothing that was said is left out."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from llmc.runtime.text.normal_messages import Json

_SYSTEM = ("system", "developer")


def with_system(messages: Sequence[Json], text: str) -> list[Json]:
    """Add a text to the system message at the beginning, or as a new system message."""
    system = {"role": "system", "content": text}
    if not messages or messages[0].get("role") not in _SYSTEM:
        return [system, *messages]
    return [_joined([messages[0], system]), *messages[1:]]


def systems_first(messages: Sequence[Json]) -> list[Json]:
    """A single system message before all others, with the contents of all of them."""
    system = [message for message in messages if message.get("role") in _SYSTEM]
    others = [message for message in messages if message.get("role") not in _SYSTEM]
    return [{**_joined(system), "role": "system"}, *others] if system else others


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
    turns: list[Json] = []
    last = "assistant"
    for message in messages:
        role = message.get("role")
        if not _is_turn(message):
            turns.append(message)
            continue
        if role == last and turns and _is_turn(turns[-1]):
            turns[-1] = _joined([turns[-1], message])
            continue
        if role == last:
            turns.append({"role": "user" if role == "assistant" else "assistant", "content": filler})
        turns.append(message)
        last = str(role)
    return turns


def texts_before_calls(messages: Iterable[Json]) -> list[Json]:
    """A message with a text and calls is two: what was said, then what was called and thought before."""

    split: list[Json] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            split.append({name: message[name] for name in message if name not in ("tool_calls", "reasoning_content")})
            split.append({**message, "content": ""})
        else:
            split.append(message)
    return split


def one_call_each(messages: Sequence[Json]) -> list[Json]:
    """Split a message with several calls into one per call, each followed by the result of its call."""
    split: list[Json] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results = list(takewhile(lambda message: message.get("role") == "tool", waiting))
        del waiting[: len(results)]
        for index, call in enumerate(calls):
            kept = message if index == 0 else {"role": message["role"], "content": ""}
            own = next((result for result in results if result.get("tool_call_id") == call["id"]), None)
            split += [{**kept, "tool_calls": [call]}, *([] if own is None else [own])]
            results = [result for result in results if result is not own]
        split += results
    return split


def _is_turn(message: Json) -> bool:
    return message.get("role") == "user" or (message.get("role") == "assistant" and not message.get("tool_calls"))


def _joined(messages: Sequence[Json]) -> Json:
    """The first message with the contents of all of them, and their thoughts."""
    contents = [message["content"] for message in messages]
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    joined = {**messages[0], "content": _joined_contents(contents)}
    return {**joined, "reasoning_content": "\n\n".join(thoughts)} if thoughts else joined


def _joined_contents(contents: Sequence[Any]) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    parts: list[Any] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts
