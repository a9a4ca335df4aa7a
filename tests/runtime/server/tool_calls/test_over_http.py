"""Each form from the model to the client: chat and responses, whole and streamed, free and beside a response_format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from llmc.runtime.server.app import create_app
from llmc.runtime.server.chat_deltas import joined_message
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.serve import close_model, open_model
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tool_calls.known_forms import FORMS
from tests.quick_sample import quick_sample
from tests.runtime.server.tool_calls.samples import CALLS, JSON, ONE_CALL, SCHEMAS
from tests.runtime.server.tool_calls.scripted_engine import write_scripted_engine

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"})
FUNCTIONS: list[dict[str, Any]] = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
USER = [{"role": "user", "content": "?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}


@contextmanager
def opened(directory: Path, script: str, form: str, special: frozenset[str]) -> Iterator[ServedModel]:
    """A model that says the script, and whose calls are in the form."""
    engine = write_scripted_engine(directory / "scripted.llmc", script, special)
    options = ServeOptions(engine=engine, tool_call_parser=form, reasoning_parser="think")
    model = open_model(options, CollectorRegistry())
    try:
        yield model
    finally:
        close_model(model)


def asked(model: ServedModel, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer, or the events of a stream."""

    async def ask() -> str:
        transport = httpx.ASGITransport(app=create_app(model, CollectorRegistry(), ServeOptions(engine=Path()), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://llmc", timeout=None) as client:
            answer = await client.post(route, json={"temperature": 0, **body})
            assert answer.status_code == 200, answer.text
            return answer.text

    text = asyncio.run(ask())
    if not body.get("stream"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


@pytest.mark.parametrize("form", quick_sample(FORMS, ("openai", "qwen3_coder", "deepseek_v3")))
def test_calls_reach_the_client(form: str, tmp_path: Path) -> None:
    """Beside a response_format, too, which would forbid them as an answer."""
    harmony = FORMS[form].channels
    calls = CALLS.get(form) or ONE_CALL[form]
    expected = [("weather", JSON), ("now", "{}")][: 1 if form in ONE_CALL else 2]
    script = (ANALYSIS if harmony else "<think>Let me see.</think>\n") + calls
    # Some forms with marks that are special tokens, as their tokenizers have them.
    special = HARMONY if harmony else frozenset(mark for mark in FORMS[form].marks if mark[:2] in ("<|", "<｜"))
    with opened(tmp_path, script, form, special) as model:
        chat = {"messages": USER, "tools": TOOLS}
        for more in ({}, {"response_format": FORMAT}, {"tool_choice": "required"}):
            (answer,) = asked(model, "/v1/chat/completions", {**chat, **more})
            (choice,) = answer["choices"]
            assert functions(choice["message"]) == expected, more
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
            assert choice["message"]["reasoning"] == "Let me see."
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        chunks = asked(model, "/v1/chat/completions", {**chat, "stream": True})
        message = joined_message([each["delta"] for chunk in chunks for each in chunk["choices"]])
        assert functions(message) == expected and message["reasoning"] == "Let me see."
        items = {"input": "?", "tools": [{"type": "function", **function} for function in FUNCTIONS]}
        (response,) = asked(model, "/v1/responses", items)
        found = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
        assert found == expected and response["output"][0]["type"] == "reasoning"
        last = asked(model, "/v1/responses", {**items, "stream": True})[-1]
        assert [item.get("arguments") for item in last["response"]["output"]] == [None, *(a for _, a in expected)]


def test_tool_choices(tmp_path: Path) -> None:
    """What a model says that calls two functions, under each choice that a request has."""
    with opened(tmp_path, CALLS["mistral"], "mistral", frozenset({"[TOOL_CALLS]"})) as model:

        def choice(**more: Any) -> dict[str, Any]:
            (answer,) = asked(model, "/v1/chat/completions", {"messages": USER, "tools": TOOLS, **more})
            found: dict[str, Any] = answer["choices"][0]
            return found

        both, first = [("weather", JSON), ("now", "{}")], [("weather", JSON)]
        message = choice()["message"]
        assert functions(message) == both
        # Mistral's templates take no other ids.
        assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in message["tool_calls"])
        assert functions(choice(parallel_tool_calls=False)["message"]) == first
        assert len(functions(choice(parallel_tool_calls=False, response_format=FORMAT)["message"])) == 1
        assert functions(choice(tool_choice="required", response_format=FORMAT)["message"]) == both
        named = choice(tool_choice={"type": "function", "function": {"name": "weather"}})
        ((name, _),) = functions(named["message"])
        assert (name, named["finish_reason"]) == ("weather", "stop")
        cut = choice(tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=2)
        assert functions(cut["message"]) == [("weather", "")] and cut["finish_reason"] == "length"
        text = choice(tool_choice="none")
        assert text["finish_reason"] == "stop" and '"weather"' in text["message"]["content"]
        assert choice(tool_choice="none", response_format=FORMAT)["message"]["content"] in ('"yes"', '"no"')


def test_a_call_that_a_stop_string_cuts_is_none_to_make(tmp_path: Path) -> None:
    """Its arguments are not made whole; a closing mark as a stop string cuts nothing."""
    with opened(tmp_path, CALLS["qwen3_coder"], "qwen3_coder", frozenset()) as model:

        def found(stop: str) -> tuple[list[tuple[str, str]], str]:
            (answer,) = asked(model, "/v1/chat/completions", {"messages": USER, "tools": TOOLS, "stop": [stop]})
            return functions(answer["choices"][0]["message"]), answer["choices"][0]["finish_reason"]

        assert found("dź") == ([("weather", '{"city": "Łó')], "stop")
        assert found("</function>") == ([("weather", JSON)], "tool_calls")
        assert found("<function=now>") == ([("weather", JSON)], "tool_calls")
