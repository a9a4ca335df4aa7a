"""POST /v1/responses over HTTP: items, events in order, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.server.responses.conversation import messages_of, output_items
from llmc.runtime.server.responses.output_items import OutputItems
from llmc.runtime.server.responses.store import ResponseStore, StoredResponse, replica_of
from tests.runtime.server.conftest import serving
from tests.runtime.server.test_bad_input import assert_refused
from tests.runtime.server.test_chat import TIME, USER, WEATHER, chat

GREEDY = {"temperature": 0, "max_output_tokens": 24}

TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]


def respond(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", json={"input": "Good morrow", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events, whose names and numbers have to be right."""
    body = {"input": "Good morrow", **GREEDY, **body, "stream": True}
    with client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_a_response_is_what_chat_answers(client: httpx.Client) -> None:
    answer = respond(client, instructions="Be brief.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    same = chat(client, messages=messages, temperature=0, max_tokens=24)
    assert text_of(answer) == same["choices"][0]["message"]["content"]
    assert answer["object"] == "response" and answer["id"].startswith("resp_") and answer["metadata"] == {"a": "b"}
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 24 and answer["instructions"] == "Be brief."
    assert answer["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]


def test_a_stream_has_its_events_in_order(client: httpx.Client) -> None:
    events = streamed(client)
    names = [event["type"] for event in events]
    deltas = names.count("response.output_text.delta")
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    whole = respond(client)
    assert "".join(event.get("delta", "") for event in events) == text_of(whole)
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert events[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_function_calls_are_items(client: httpx.Client, choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 90}
    whole = respond(client, **body)
    (call,) = whole["output"]
    assert call["type"] == "function_call" and call["status"] == whole["status"] == "completed"
    assert isinstance(json.loads(call["arguments"]), dict) and call["call_id"] != call["id"]
    events = streamed(client, **body)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call["arguments"]
    assert [event["type"] for event in events][-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_round_of_functions_is_a_conversation(client: httpx.Client) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "time",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Noon.", "annotations": []}],
        },
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "assistant", "content": "Noon."},
    ]
    same = chat(client, messages=messages, temperature=0, max_tokens=24)
    assert text_of(respond(client, input=items)) == same["choices"][0]["message"]["content"]
    (_, asked, _, _) = messages_of(output_items(items))
    assert asked.reasoning == "Ask." and asked.tool_calls and asked.tool_calls[0].id == "c1"


def test_only_some_tools_are_allowed(client: httpx.Client) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    (call, *_) = respond(client, tools=TOOLS, tool_choice=allowed, max_output_tokens=60)["output"]
    assert call["name"] == "time"
    allowed["tools"] = [{"type": "function", "name": "king"}]
    body = {"input": "hi", "tools": TOOLS, "tool_choice": allowed}
    assert "'king'" in assert_refused(client.post("/v1/responses", json=body))


def test_json_of_a_schema(client: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"enum": ["Romeo", "Juliet"]}, "strict": True}
    answer = respond(client, text={"format": form})
    assert json.loads(text_of(answer)) in ("Romeo", "Juliet") and answer["status"] == "completed"
    assert answer["text"]["format"]["schema"] == form["schema"]


def test_log_probabilities(client: httpx.Client) -> None:
    answer = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 24 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = streamed(client, include=["message.output_text.logprobs"], top_logprobs=2)
    assert [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]] == entries


def test_thoughts_are_reasoning_items(thinking: httpx.Client) -> None:
    message = chat(thinking, temperature=0, max_tokens=40)["choices"][0]["message"]
    whole = respond(thinking, max_output_tokens=40, include=["message.output_text.logprobs"])
    thought, said = whole["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [
        {"type": "reasoning_text", "text": message["reasoning"]}
    ]
    assert text_of(whole) == message["content"]
    spent = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert spent > 0 and len(said["content"][0]["logprobs"]) == 40 - spent
    events = streamed(thinking, max_output_tokens=40)
    assert without_ids(events[-1]["response"]["output"])[0] == without_ids(whole["output"])[0]
    kinds = list(dict.fromkeys(event["type"] for event in events if event["type"].endswith((".delta", ".done"))))
    assert kinds == [
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
    ]
    assert respond(thinking, reasoning={"effort": "none"})["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_conversation_goes_on(client: httpx.Client) -> None:
    first = respond(client)
    second = respond(client, input="And thou?", previous_response_id=first["id"], instructions="Be brief.")
    said = {"role": "assistant", "content": text_of(first)}
    messages = [{"role": "system", "content": "Be brief."}, *USER, said, {"role": "user", "content": "And thou?"}]
    same = chat(client, messages=messages, temperature=0, max_tokens=24)
    assert text_of(second) == same["choices"][0]["message"]["content"]
    third = streamed(client, input="Ay", previous_response_id=second["id"])[-1]["response"]
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert client.get(f"/v1/responses/{third['id']}").json() == third
    (item,) = client.get(f"/v1/responses/{third['id']}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Ay"}]


def test_what_is_not_kept_is_not_found(client: httpx.Client) -> None:
    unkept, kept = respond(client, store=False), respond(client)
    assert unkept["store"] is False
    assert client.delete(f"/v1/responses/{kept['id']}").json() == {
        "id": kept["id"],
        "object": "response",
        "deleted": True,
    }
    for identity in (unkept["id"], kept["id"], "resp_x"):
        assert_refused(client.get(f"/v1/responses/{identity}"), 404)
        assert_refused(client.delete(f"/v1/responses/{identity}"), 404)
        answer = client.post("/v1/responses", json={"input": "x", "previous_response_id": identity})
        assert "no response" in assert_refused(answer)
        assert answer.json()["error"]["code"] == "previous_response_not_found"


def test_truncation_leaves_out_the_oldest_turns(client: httpx.Client) -> None:
    turns = [{"role": "user", "content": f"{i} " + "Good morrow, my lord. " * 8} for i in range(20)]
    system = {"role": "system", "content": "Be brief."}
    refused = client.post("/v1/responses", json={"input": [system, *turns], **GREEDY})
    assert "512" in assert_refused(refused)
    fitted = respond(client, input=[system, *turns], truncation="auto")["usage"]["input_tokens"]
    counts = [
        respond(client, input=[system, *turns[i:]], max_output_tokens=1)["usage"]["input_tokens"] for i in (-1, -2)
    ]
    turn = counts[1] - counts[0]
    assert 512 - 24 - turn - 4 < fitted <= 512 - 24


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"input": []}, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "reads text only, no images",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "previous_response_id"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"tool_choice": "required"}, "tools"),
    ({"max_tokens": 5}, "unknown field max_tokens"),
    ({"metadata": {"a": "\ud800"}}, "surrogate"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": float("nan")}}]}, "JSON"),
)


@pytest.mark.parametrize("fields, said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_done_is_said(client: httpx.Client, fields: dict[str, Any], said: str) -> None:
    content = json.dumps({"input": "hi", "max_output_tokens": 4, **fields})
    answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert said in f"{assert_refused(answer)} {answer.json()['error']['param']}"
    assert answer.json()["error"]["param"] != "messages", "it has no such field"


def test_ignored_settings_are_told(client: httpx.Client) -> None:
    answer = respond(client, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, max_tool_calls=3)
    assert len(answer["warnings"]) == 3
    assert "warnings" not in respond(client, store=True)


@pytest.mark.slow
def test_keys_do_not_share_responses(engine_directory: Path) -> None:
    with (
        serving(engine_directory, "--api-key", "a", "--api-key", "b") as live,
        live.client("a") as ours,
        live.client("b") as theirs,
    ):
        made = respond(ours)
        assert ours.get(f"/v1/responses/{made['id']}").status_code == 200
        assert_refused(theirs.get(f"/v1/responses/{made['id']}"), 404)
        assert_refused(theirs.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]}))


def stored(identity: str, size: int, tenant: str | None = None) -> StoredResponse:
    return StoredResponse({"id": identity}, (), (), size, tenant)


def test_the_store_is_bounded_in_bytes_and_age() -> None:
    clock = [0.0]
    store = ResponseStore(30_000, 10.0, now=lambda: clock[0])
    for name in ("a", "b", "c"):
        store.put(stored(name, 5_000))
    assert store.get("a", None) is not None
    store.put(stored("d", 5_000))
    assert [name for name in "abcd" if store.get(name, None)] == ["a", "c", "d"]
    store.put(stored("e", 50_000))
    assert store.get("e", None) is None and store.get("a", None) is not None
    clock[0] = 10.1
    assert not any(store.get(name, None) for name in "abcde")
    assert not store.delete("a", None) and not ResponseStore(0, 10.0).keeps
    store.put(stored("f", 1, "us"))
    assert store.get("f", None) is None and store.delete("f", "us") and not store.delete("f", "us")


def test_ids_tell_the_replica() -> None:
    assert replica_of(ResponseStore(1, 1.0, replica=7).new_id()) == 7
    assert replica_of("") is replica_of("resp_x") is replica_of("resp_" + "z" * 34) is None


def test_items_follow_each_other() -> None:
    """An item is done before the next begins, and what max_tokens cut is incomplete."""
    items = OutputItems()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    deltas: list[dict[str, Any]] = [{"reasoning": "Hm"}, {"content": "So"}, {"content": "."}, {"tool_calls": [call]}]
    events = [event for delta in deltas for event in items.add(delta, [])] + list(items.finish("incomplete"))
    order = [event["output_index"] for event in events]
    assert order == sorted(order)
    assert [(item["type"], item["status"]) for item in items.items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert items.items[2]["arguments"] == '{"a' and items.items[1]["content"][0]["text"] == "So."
