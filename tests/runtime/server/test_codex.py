"""Requests as the Codex command line sends them to /v1/responses: fields, tools and items beside functions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from llmc.runtime.server.responses.conversation import input_items, messages_of
from llmc.runtime.server.schemas.responses import ResponsesRequest

SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "defer_loading": True,
}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": {"type": "grammar"}},
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "d",
        "tools": [{"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}],
    },
]
# As its first turn has it.
FIRST: dict[str, Any] = {
    "model": "bard",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context><cwd>/</cwd></environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [SHELL, *OTHER_TOOLS],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "service_tier": None,
    "client_metadata": {"x-codex-installation-id": "0199"},
    "max_output_tokens": 8,
}
# And what it adds when calls were made.
CALLS: list[dict[str, Any]] = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look"}], "content": None},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
    {
        "type": "function_call",
        "name": "shell",
        "arguments": '{"command": ["ls"',
        "call_id": "call_1",
        "namespace": None,
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "no JSON"},
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin",
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "done"}]},
    {
        "type": "local_shell_call",
        "id": None,
        "call_id": "call_3",
        "status": "completed",
        "action": {"type": "exec", "command": ["pwd"]},
    },
    {"type": "function_call_output", "call_id": "call_3", "output": {"content": "/", "success": True}},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "weather"}},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "0"}},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"type": "message", "role": "assistant", "content": [], "phase": "commentary"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
]


def events_of(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_two_turns(client: httpx.Client) -> None:
    first = events_of(client, FIRST)
    assert [event["type"] for event in first[:2]] == ["response.created", "response.in_progress"]
    ended = first[-1]["response"]
    assert first[-1]["type"] in ("response.completed", "response.incomplete") and ended["usage"]["output_tokens"] == 8
    warnings = "\n".join(ended["warnings"])
    for tool in OTHER_TOOLS:
        assert f"tools of type {tool['type']} are left out" in warnings
    for part in ("client_metadata", "tools.0.defer_loading", "reasoning.context", "reasoning.encrypted_content"):
        assert part in warnings
    assert [tool["name"] for tool in ended["tools"]] == ["shell"]
    done = [event["item"] for event in first if event["type"] == "response.output_item.done"]
    second = events_of(client, {**FIRST, "input": [FIRST["input"][-1], *done, *CALLS]})
    assert second[-1]["type"] in ("response.completed", "response.incomplete")
    assert "input items of type web_search_call are left out" in second[-1]["response"]["warnings"]
    assert "input items of type custom_tool_call are read as calls of functions" in second[-1]["response"]["warnings"]


def test_calls_of_other_tools_are_read_as_calls_of_functions() -> None:
    messages = messages_of(input_items(ResponsesRequest.model_validate({"input": CALLS})))
    assert [message.role for message in messages] == ["assistant", "tool"] * 3 + ["assistant", "user"]
    assert messages[0].reasoning == "Look"
    made = [(call.function.name, call.function.arguments) for m in messages for call in m.tool_calls or ()]
    assert made == [
        ("shell", '{"command": ["ls"'),
        ("apply_patch", '{"input": "*** Begin"}'),
        ("local_shell", '{"type": "exec", "command": ["pwd"]}'),
    ]
    assert [m.text() for m in messages if m.role == "tool"] == ["no JSON", "done", "/"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
    ],
)
def test_a_choice_of_tools_that_are_left_out_is_left_out(client: httpx.Client, choice: dict[str, Any]) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "tools": [SHELL, *OTHER_TOOLS], "tool_choice": choice}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == "auto"


def test_nothing_but_other_tools(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ):
        answer = client.post(path, json={**body, "tools": OTHER_TOOLS[1:3], "tool_choice": "auto"})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["warnings"]) == 2
    answer = client.post("/v1/responses", json={"input": "hi", "tools": OTHER_TOOLS, "tool_choice": "required"})
    assert answer.status_code == 400 and "tool_choice needs tools" in answer.text
