"""A response's output items as they grow, and the typed events that report it."""

import copy
import uuid
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


class OutputItems:
    """Takes the deltas of a chat message and makes items of them: reasoning, messages, function calls.

    Events come without their sequence_number. An item is complete before the next one begins.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._is_open = False
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def add(self, delta: Json, logprobs: list[Json]) -> Iterator[Json]:
        """Events of a delta. logprobs: the logprobs of the tokens of its text."""
        if "reasoning" in delta:
            yield from self._begin("reasoning")
            yield self._piece("response.reasoning_text.delta", delta["reasoning"])
        if delta.get("content"):
            yield from self._begin("message")
            self._logprobs += logprobs
            yield {**self._piece("response.output_text.delta", delta["content"]), "logprobs": logprobs}
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin_call(call)
            if call["function"]["arguments"]:
                yield self._piece("response.function_call_arguments.delta", call["function"]["arguments"])

    def finish(self, status: str) -> Iterator[Json]:
        """Events of the end. status: the status of the item that was not complete before; without any item there is a
        message."""
        if not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin(self, kind: str) -> Iterator[Json]:
        """Open an item with a part of text, unless it is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self._close("completed")
        identity = uuid.uuid4().hex
        if kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{identity}", "summary": [], "content": []}
        else:
            item = {"type": "message", "id": f"msg_{identity}", "role": "assistant", "content": []}
        yield self._open(item)
        yield {**self._place("response.content_part.added"), "part": self._part(), "content_index": 0}

    def _begin_call(self, call: Json) -> Iterator[Json]:
        yield from self._close("completed")
        name, identity = call["function"]["name"], f"fc_{uuid.uuid4().hex}"
        yield self._open(
            {"type": "function_call", "id": identity, "call_id": call["id"], "name": name, "arguments": ""}
        )

    def _open(self, item: Json) -> Json:
        self.items.append({**item, "status": "in_progress"})
        self._is_open, self._text, self._logprobs = True, [], []
        return self._item_event("response.output_item.added")

    def _piece(self, kind: str, text: str) -> Json:
        self._text.append(text)
        event = {**self._place(kind), "delta": text}
        return event if self.items[-1]["type"] == "function_call" else {**event, "content_index": 0}

    def _close(self, status: str) -> Iterator[Json]:
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = "".join(self._text)
            done = self._place("response.function_call_arguments.done")
            yield {**done, "name": item["name"], "arguments": item["arguments"]}
        else:
            part = self._part()
            item["content"] = [part]
            is_text = item["type"] == "message"
            done = self._place("response.output_text.done" if is_text else "response.reasoning_text.done")
            done |= {"content_index": 0, "text": part["text"]}
            yield {**done, "logprobs": self._logprobs} if is_text else done
            yield {**self._place("response.content_part.done"), "part": copy.deepcopy(part), "content_index": 0}
        yield self._item_event("response.output_item.done")

    def _part(self) -> Json:
        text = "".join(self._text)
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _place(self, kind: str) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, kind: str) -> Json:
        return {"type": kind, "output_index": len(self.items) - 1, "item": copy.deepcopy(self.items[-1])}
