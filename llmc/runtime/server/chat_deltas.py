"""A choice's text as chat deltas: content, or tool calls where the request has tools."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from llmc.runtime.server.tool_calls import ParsedCall, RequiredCallsReader, ToolCallReader

Json = dict[str, Any]


class ChatDeltas(Protocol):
    """Turns pieces of a choice's text into deltas of an assistant's message."""

    def feed(self, text: str, last: bool) -> list[Json]:
        """The deltas that are certain after this piece; `last`: no other follows."""
        ...

    def finish_reason(self, reason: str) -> str:
        """The engine's reason as the client is told it."""
        ...


class ContentDeltas:
    """Every piece is content."""

    def feed(self, text: str, last: bool) -> list[Json]:
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str) -> str:
        return reason


class AutoToolDeltas:
    """Content, and tool calls where the model wrote some.

    single: nothing after the first call counts. ends: texts of end tokens, left out where special tokens are shown.
    """

    def __init__(self, reader: ToolCallReader, single: bool, ends: tuple[str, ...] = ()) -> None:
        self._reader = reader
        self._single = single
        self._ends = ends
        self._told = 0

    def feed(self, text: str, last: bool) -> list[Json]:
        if last:
            text = text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))
        content, calls = self._reader.feed(text)
        if last:
            rest, more = self._reader.finish()
            content, calls = content + rest, calls + more
        # Models set calls off with line breaks, which are no message.
        if (calls or self._told) and not content.strip():
            content = ""
        deltas: list[Json] = [{"content": content}] if content else []
        for call in calls[: max(0, 1 - self._told)] if self._single else calls:
            deltas.append({"tool_calls": [call_json(self._told, call)]})
            self._told += 1
        return deltas

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._told and reason == "stop" else reason


class RequiredToolDeltas:
    """The output is a list of calls: tool_choice is `required`."""

    def __init__(self) -> None:
        self._reader = RequiredCallsReader()
        self._told = 0

    def feed(self, text: str, last: bool) -> list[Json]:
        deltas: list[Json] = []
        for call in self._reader.feed(text):
            deltas.append({"tool_calls": [call_json(self._told, call)]})
            self._told += 1
        return deltas

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" else reason


class NamedToolDeltas:
    """The output is the arguments of one function, passed on as it comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str, last: bool) -> list[Json]:
        if not text and not (last and not self._begun):
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return [{"tool_calls": [call_json(0, ParsedCall(self._name, text))]}]

    def finish_reason(self, reason: str) -> str:
        return reason


def call_json(index: int, call: ParsedCall) -> Json:
    """A tool call that begins (and may be whole) in this delta."""
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def joined_message(deltas: list[Json]) -> Json:
    """The whole message that the deltas make."""
    content = "".join(delta["content"] for delta in deltas if "content" in delta)
    calls: dict[int, Json] = {}
    for part in (call for delta in deltas for call in delta.get("tool_calls", ())):
        known = calls.get(part["index"])
        if known is None:
            function = dict(part["function"])
            calls[part["index"]] = {"id": part["id"], "type": part["type"], "function": function}
        else:
            known["function"]["arguments"] += part["function"]["arguments"]
    message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    return {**message, "tool_calls": list(calls.values())} if calls else message
