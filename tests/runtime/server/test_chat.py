"""POST /v1/chat/completions over HTTP: messages, tools, structured outputs, log-probabilities, streams."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from llmc.runtime.server.chat_deltas import joined_message
from tests.runtime.server.test_completions import events

USER = [{"role": "user", "content": "Good morrow"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Verona"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}},
}


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 8, "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def test_a_chat(client: httpx.Client) -> None:
    answer = chat(client, model="bard", max_completion_tokens=5)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5


def test_streams_say_the_same_as_whole_answers(client: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 10, "seed": 3, "n": 2}
    whole = chat(client, **body)
    chunks = events(client, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_log_probabilities(client: httpx.Client) -> None:
    content = chat(client, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= 0 and bytes(entry["bytes"]).decode("utf-8", "replace")


def test_a_forced_function_gets_arguments_of_its_schema(client: httpx.Client) -> None:
    choice_of = {"type": "function", "function": {"name": "weather"}}
    choice = chat(client, tools=[WEATHER], tool_choice=choice_of, max_tokens=60)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Rome", "Verona") and 1 <= arguments["days"] <= 9
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("streamed", [False, True])
def test_required_tools_are_called(client: httpx.Client, streamed: bool) -> None:
    body = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    if streamed:
        chunks = events(client, "/v1/chat/completions", messages=USER, seed=3, **body)
        parts = [c for chunk in chunks for c in chunk["choices"]]
        calls = joined_message([part["delta"] for part in parts])["tool_calls"]
        reason = parts[-1]["finish_reason"]
    else:
        choice = chat(client, **body)["choices"][0]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    (call,) = calls
    assert reason == "tool_calls"
    assert call["function"]["name"] in ("weather", "time")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("choice_of", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("streamed", [False, True])
def test_calls_that_max_tokens_cuts_are_told(client: httpx.Client, choice_of: Any, streamed: bool) -> None:
    """At every length: the text of what came, or the call's name with its arguments as far as they came."""
    body = {"tools": [WEATHER], "tool_choice": choice_of, "temperature": 0, "parallel_tool_calls": False}
    answer = chat(client, **body, max_tokens=90)
    (whole,) = answer["choices"][0]["message"]["tool_calls"]
    seen = set()
    for count in range(2, answer["usage"]["completion_tokens"] - 1, 3):
        if streamed:
            chunks = events(client, "/v1/chat/completions", messages=USER, **body, max_tokens=count)
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            parts = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            choice = chat(client, **body, max_tokens=count)["choices"][0]
            assert choice["finish_reason"] == "length"
            parts = [call["function"] for call in choice["message"].get("tool_calls", ())]
            text = choice["message"]["content"] or ""
        arguments = "".join(part["arguments"] for part in parts)
        assert (choice_of == "required" and text.startswith("<") and not parts) or parts[0]["name"] == "weather"
        assert whole["function"]["arguments"].replace(" ", "").startswith(arguments.replace(" ", ""))
        seen.add(arguments)
    assert len(seen) > 2


def test_a_whole_round_of_tools_is_a_prompt(client: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    tokenized = client.post("/tokenize", json={"messages": messages, "tools": [TIME]}).json()
    prompt = client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()["prompt"]
    assert '"name": "time"' in prompt.split("[system]")[0]
    assert "[system] Be brief.\n[user] What time?\n" in prompt
    assert '[assistant] <tool_call>{"name": "time", "arguments": {"zone": "UTC"}}</tool_call>' in prompt
    assert prompt.endswith("[tool] noon\n[assistant] ")
    assert chat(client, messages=messages, tools=[TIME])["usage"]["prompt_tokens"] == tokenized["count"]


SHAPES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"enum": ["Romeo", "Juliet"]}},
            }
        },
        '"(Romeo|Juliet)"',
    ),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_regex": "x{2}y"}, "xxy"),
    ({"guided_json": {"type": "null"}}, "null"),
)


@pytest.mark.parametrize("fields, pattern", SHAPES, ids=[f"{i}-{next(iter(f))}" for i, (f, _) in enumerate(SHAPES)])
def test_outputs_have_the_shape_that_was_asked_for(client: httpx.Client, fields: Any, pattern: str) -> None:
    choice = chat(client, **fields, max_tokens=200, temperature=1.0)["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, text, re.DOTALL), text
    else:
        assert pattern == r"\{.*\}" and text.lstrip().startswith("{"), text


def test_a_template_of_the_request(client: httpx.Client) -> None:
    body = {
        "messages": USER,
        "chat_template": "{{ tone }}: {{ messages[0].content }}",
        "chat_template_kwargs": {"tone": "Q"},
    }
    tokenized = client.post("/tokenize", json=body).json()
    assert client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()["prompt"] == "Q: Good morrow"
