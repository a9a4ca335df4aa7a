"""A choice's text as chat deltas: thoughts, then content, or tool calls where the request has tools."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.runtime.requests.request_output import ChoiceDelta, FinishReason
from llmc.runtime.server.output_events import CallArguments, CallBegun, Event, Text, Thought
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.server.thinking import ThinkingReader

Json = dict[str, Any]
NewIdentity = Callable[[], str]


@dataclass(frozen=True)
class Ending:
    """Why an output has ended. stop: the stop string that ended it, if one did."""

    reason: FinishReason
    stop: str | None = None


def ending_of(delta: ChoiceDelta) -> Ending | None:
    """Return how the answer ends with this delta; None if another one may follow."""
    stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    return None if delta.finish_reason is None else Ending(delta.finish_reason, stop)


class ChatDeltas(ABC):
    """Turns pieces of a choice's text into deltas of an assistant's message."""

    @abstractmethod
    def feed(self, text: str, ended: Ending | None) -> list[Json]:
        """The deltas that are certain after this piece. ended: why no other follows; None if one may."""

    def finish_reason(self, reason: FinishReason) -> str:
        """The engine's reason in the client's terms."""
        return reason


class ContentDeltas(ChatDeltas):
    """Every piece is content."""

    def feed(self, text: str, ended: Ending | None) -> list[Json]:
        return [{"content": text}] if text else []


class EventDeltas(ChatDeltas):
    """Deltas from a reader's events: thoughts, content and tool calls, whose arguments come piece by piece.

    single: nothing after the first call counts. forced: the function that the output calls and does nothing else.
    marks: the marks of the form of calls; another stop string may cut a call.
    """

    def __init__(
        self,
        reader: OutputReader,
        new_identity: NewIdentity,
        *,
        single: bool,
        shows_thoughts: bool,
        forced: str | None = None,
        marks: frozenset[str] = frozenset(),
    ) -> None:
        self._reader = reader
        self._new_identity = new_identity
        self._single = single
        self._shows_thoughts = shows_thoughts
        self._forced = forced
        self._marks = marks
        self._calls = 0
        self._last_arguments = ""
        self._is_cut = False
        self._thinks = False

    def feed(self, text: str, ended: Ending | None) -> list[Json]:
        self._is_cut = ended is not None and (ended.reason != "stop" or not self._is_mark(ended.stop))
        events = self._reader.feed(text, ended=ended is not None, cut=self._is_cut)
        deltas: list[Json] = []
        for event in events:
            self._add(event, deltas)
        if ended is not None and self._forced is not None and not self._calls and not self._thinks:
            self._add(CallBegun(self._forced), deltas)
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        # OpenAI's answers to a request that names the function end with `stop`. A client makes no call that was cut.
        calls = self._calls and self._forced is None and not (self._is_cut and not _is_json(self._last_arguments))
        return "tool_calls" if calls and reason == "stop" else reason

    def _add(self, event: Event, deltas: list[Json]) -> None:
        self._thinks = isinstance(event, Thought)
        if isinstance(event, Text):
            deltas += [{"content": event.text}] if self._forced is None else []
        elif isinstance(event, Thought):
            deltas += [thought_json(event.text)] if self._shows_thoughts else []
        elif isinstance(event, CallBegun):
            self._calls += 1
            self._last_arguments = ""
            if self._is_told:
                identity = event.identity or self._new_identity()
                deltas.append({"tool_calls": [call_json(self._calls - 1, event.name, identity)]})
        elif self._is_told:
            self._last_arguments += event.text
            self._add_arguments(event, deltas)

    def _add_arguments(self, event: CallArguments, deltas: list[Json]) -> None:
        """Add arguments to the delta in which the call begins, if it is the last one."""
        if deltas and "tool_calls" in deltas[-1]:
            deltas[-1]["tool_calls"][0]["function"]["arguments"] += event.text
        else:
            deltas.append({"tool_calls": [{"index": self._calls - 1, "function": {"arguments": event.text}}]})

    def _is_mark(self, stop: str | None) -> bool:
        """Whether a stop string, if there is one, is a mark of the form or begins with one."""
        begun = "" if stop is None else stop.strip()
        of_form = begun and any(mark.startswith(begun) or begun.startswith(mark) for mark in self._marks)
        return stop is None or bool(of_form)

    @property
    def _is_told(self) -> bool:
        return self._calls <= 1 or not self._single


class ThinkingDeltas(ChatDeltas):
    """A model's thoughts under `reasoning`, then whatever its answer is.

    answer: reads the text after the thoughts. shows: whether thoughts are sent to the client."""

    def __init__(self, reader: ThinkingReader, answer: ChatDeltas, shows: bool) -> None:
        self._reader = reader
        self._answer = answer
        self._shows = shows

    def feed(self, text: str, ended: Ending | None) -> list[Json]:
        events = self._reader.feed(text, ended=ended is not None)
        deltas = [thought_json(event.text) for event in events if isinstance(event, Thought) and self._shows]
        answer = "".join(event.text for event in events if isinstance(event, Text))
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

    def feed(self, text: str, ended: Ending | None) -> list[Json]:
        if ended is not None and ended.reason == "stop":
            text = text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))
        return self._inner.feed(text, ended)

    def finish_reason(self, reason: FinishReason) -> str:
        return self._inner.finish_reason(reason)


def call_json(index: int, name: str, identity: str) -> Json:
    """The JSON of a tool call that begins in this delta."""
    return {"index": index, "id": identity, "type": "function", "function": {"name": name, "arguments": ""}}


def thought_json(text: str) -> Json:
    """The model's thoughts. OpenAI has no field for them; vLLM has used both names."""
    return {"reasoning": text, "reasoning_content": text}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
