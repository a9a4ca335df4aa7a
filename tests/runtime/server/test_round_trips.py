"""Whatever the server gives out it takes back: answers that were cut anywhere, empty ones, calls that are no JSON."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from llmc.runtime.server.schemas.chat import ChatRequest, Message, ToolCall
from llmc.runtime.server.schemas.completion import CompletionRequest
from llmc.runtime.server.schemas.field_notes import REFUSED
from llmc.runtime.server.schemas.responses import ResponsesRequest
from llmc.runtime.server.schemas.tokens import TokenizeRequest
from tests.runtime.server.test_chat import TIME, USER, WEATHER, chat
from tests.runtime.server.test_completions import events

Json = dict[str, Any]
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
CUTS = (1, 2, 5, 9, 13, 40)


def next_turn(message: Json) -> list[Json]:
    """The conversation of the next request: a result for each call, and another question."""
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "1"} for c in message.get("tool_calls") or ()]
    return [*USER, message, *results, {"role": "user", "content": "Go on"}]


def joined(chunks: list[Json]) -> Json:
    """A message as clients put it together of a stream."""
    message: Json = {"role": "assistant", "content": None, "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        message["content"] = (message["content"] or "") + (delta.get("content") or "") or message["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("choice_of", ["required", "auto"])
def test_a_chat_that_was_cut_goes_on(client: httpx.Client, choice_of: str) -> None:
    told = {"tools": [WEATHER, TIME], "tool_choice": choice_of, "temperature": 0}
    for count in CUTS:
        whole = chat(client, **told, max_tokens=count)["choices"][0]["message"]
        streamed = joined(events(client, "/v1/chat/completions", messages=USER, **told, max_tokens=count))
        for message in (whole, streamed):
            assert chat(client, messages=next_turn(message), **told, max_tokens=2)["choices"]


def test_thoughts_that_were_cut_go_on(thinking: httpx.Client) -> None:
    for count in (1, 3, 40):
        for shows in (True, False):
            body = {"max_tokens": count, "temperature": 0, "include_reasoning": shows}
            message = chat(thinking, **body)["choices"][0]["message"]
            assert chat(thinking, messages=next_turn(message), max_tokens=2)["choices"]


@pytest.mark.parametrize("choice_of", ["required", "auto"])
def test_a_response_that_was_cut_goes_on(client: httpx.Client, thinking: httpx.Client, choice_of: str) -> None:
    for asked in (client, thinking):
        for count in CUTS:
            body = {"input": "Good morrow", "tools": FUNCTIONS, "tool_choice": choice_of, "temperature": 0}
            first = asked.post("/v1/responses", json={**body, "max_output_tokens": count}).json()
            calls = [item for item in first["output"] if item["type"] == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": c["call_id"], "output": "1"} for c in calls]
            added = [*outputs, {"role": "user", "content": "Go on"}]
            for again in (
                {"input": [{"role": "user", "content": "Good morrow"}, *first["output"], *added]},
                {"input": added, "previous_response_id": first["id"]},
            ):
                answer = asked.post("/v1/responses", json={"max_output_tokens": 2, **again})
                assert answer.status_code == 200, (count, first["output"], answer.text)


EMPTY: list[Json] = [
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "reasoning", "id": "rs_1", "summary": None, "content": None, "encrypted_content": None},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": ""}], "content": []},
    {"type": "message", "role": "assistant", "content": []},
    {"type": "message", "role": "assistant", "content": None},
    {"role": "assistant", "content": ""},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": None},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
    {"type": "function_call_output", "call_id": "c", "output": []},
]


@pytest.mark.parametrize("item", EMPTY, ids=range(len(EMPTY)))
def test_items_that_say_nothing_are_taken(client: httpx.Client, item: Json) -> None:
    body = {"input": [item, {"role": "user", "content": "hi"}], "max_output_tokens": 2}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


def nulls(kind: type[BaseModel]) -> Json:
    """Null for each field that need not be there."""
    return {name: None for name, field in kind.model_fields.items() if not field.is_required()}


def test_null_is_as_if_the_field_were_not_there(client: httpx.Client) -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    message = {**nulls(Message), "role": "user", "content": "hi"}
    call = {**nulls(ToolCall), "function": {"name": "f", "arguments": None}}
    said = [message, {**nulls(Message), "role": "assistant", "tool_calls": [call]}, {**nulls(Message), "role": "tool"}]
    of_all = {**dict.fromkeys(REFUSED), "unheard_of": None}
    bodies: list[tuple[str, Json]] = [
        ("/v1/chat/completions", {**nulls(ChatRequest), **of_all, "messages": said, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": said, "max_tokens": 2, "tools": [{"type": None, "function": function}]}),
        ("/v1/completions", {**nulls(CompletionRequest), **of_all, "prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {**nulls(ResponsesRequest), **of_all, "input": "hi", "max_output_tokens": 2}),
        ("/tokenize", {**nulls(TokenizeRequest), "messages": said}),
    ]
    for path, body in bodies:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "warnings" not in answer.json()
    message = client.post("/v1/completions", json={"prompt": None}).json()["error"]["message"]
    assert "prompt" in message
