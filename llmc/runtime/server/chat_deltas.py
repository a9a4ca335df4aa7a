"""A choice's text as chat deltas: thoughts, then content, or tool calls where the request has tools."""

import uuid
from abc import ABC, abstractmethod
from typing import Any

from llmc.runtime.requests.request_output import FinishReason
from llmc.runtime.server.parsed_calls import ParsedCall
from llmc.runtime.server.thinking import ThinkingReader
from llmc.runtime.server.tool_calls import RequiredCallsReader, ToolCallReader

Json = dict[str, Any]


class ChatDeltas(ABC):
    """Turns pieces of a choice's text into deltas of an assistant's message."""

    @abstractmethod
    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        """The deltas that are certain after this piece. ended: why no other follows; None if one may."""

    def finish_reason(self, reason: FinishReason) -> str:
        """The engine's reason as the client is told it."""
        return reason


class ContentDeltas(ChatDeltas):
    """Every piece is content."""

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        return [{"content": text}] if text else []


class _ToolDeltas(ChatDeltas):
    """What has been told of calls."""

    def __init__(self) -> None:
        self._told = 0

    def finish_reason(self, reason: FinishReason) -> str:
        return "tool_calls" if self._told and reason == "stop" else reason

    def _deltas(self, content: str, calls: list[ParsedCall]) -> list[Json]:
        deltas: list[Json] = [{"content": content}] if content else []
        for call in calls:
            deltas.append({"tool_calls": [call_json(self._told, call)]})
            self._told += 1
        return deltas


class AutoToolDeltas(_ToolDeltas):
    """Content, and tool calls where the model wrote some.

    single: nothing after the first call counts.
    """

    def __init__(self, reader: ToolCallReader, single: bool) -> None:
        super().__init__()
        self._reader = reader
        self._single = single

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        content, calls = self._reader.feed(text)
        if ended is not None:
            rest, more = self._reader.finish(cut=ended != "stop")
            content, calls = content + rest, calls + more
        # Models set calls off with line breaks, which are no message.
        if (calls or self._told) and not content.strip():
            content = ""
        return self._deltas(content, calls[: max(0, 1 - self._told)] if self._single else calls)


class RequiredToolDeltas(_ToolDeltas):
    """The output is a list of calls: tool_choice is `required`."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._reader = RequiredCallsReader(names)

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        calls, rest = self._reader.feed(text), ""
        if ended is not None:
            rest, begun = self._reader.finish()
            calls += begun
        return self._deltas(rest, calls)


class NamedToolDeltas(ChatDeltas):
    """The output is the arguments of one function, passed on as it comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        if not text and (ended is None or self._begun):
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return [{"tool_calls": [call_json(0, ParsedCall(self._name, text))]}]


class ThinkingDeltas(ChatDeltas):
    """A model's thoughts under `reasoning`, then whatever its answer is.

    answer: reads what comes after the thoughts. shows: whether the client is told them."""

    def __init__(self, reader: ThinkingReader, answer: ChatDeltas, shows: bool) -> None:
        self._reader = reader
        self._answer = answer
        self._shows = shows

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        thought, answer = self._reader.feed(text, ended is not None)
        deltas: list[Json] = []
        if thought and self._shows:
            deltas.append(thought_json(thought))
        if answer or (ended is not None and self._reader.in_answer):
            deltas += self._answer.feed(answer, ended)
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        return self._answer.finish_reason(reason)


class WithoutEnd(ChatDeltas):
    """The text of the token that ended the output is left out, where special tokens are shown. ends: such texts."""

    def __init__(self, ends: tuple[str, ...], inner: ChatDeltas) -> None:
        self._ends = ends
        self._inner = inner

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        if ended == "stop":
            text = text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))
        return self._inner.feed(text, ended)

    def finish_reason(self, reason: FinishReason) -> str:
        return self._inner.finish_reason(reason)


def call_json(index: int, call: ParsedCall) -> Json:
    """A tool call that begins (and may be whole) in this delta."""
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def thought_json(text: str) -> Json:
    """What the model thought; OpenAI has no field for it, and vLLM has called it by both names."""
    return {"reasoning": text, "reasoning_content": text}


def joined_message(deltas: list[Json]) -> Json:
    content = "".join(delta["content"] for delta in deltas if "content" in delta)
    thoughts = "".join(delta["reasoning"] for delta in deltas if "reasoning" in delta)
    calls: dict[int, Json] = {}
    for part in (call for delta in deltas for call in delta.get("tool_calls", ())):
        known = calls.get(part["index"])
        if known is None:
            function = dict(part["function"])
            calls[part["index"]] = {"id": part["id"], "type": part["type"], "function": function}
        else:
            known["function"]["arguments"] += part["function"]["arguments"]
    nothing = None if calls or thoughts else ""
    message: Json = {"role": "assistant", "content": content or nothing, "refusal": None}
    if thoughts:
        message |= thought_json(thoughts)
    return {**message, "tool_calls": list(calls.values())} if calls else message
