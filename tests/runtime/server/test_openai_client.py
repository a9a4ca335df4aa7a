"""openai-python, unmodified, against the server: completions, chat, streams, tools, JSON schemas, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.server.conftest import LiveServer
from tests.runtime.server.test_chat import USER, WEATHER

openai: Any = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="module")
def api(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(api: Any) -> None:
    assert [model.id for model in api.models.list()] == ["bard"]
    assert api.models.retrieve("bard").object == "model"


def test_completions(api: Any) -> None:
    whole = api.completions.create(model="bard", prompt="The king", max_tokens=6, temperature=0, logprobs=2)
    assert whole.choices[0].finish_reason == "length" and len(whole.choices[0].logprobs.tokens) == 6
    stream = api.completions.create(model="bard", prompt="The king", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat_and_streams(api: Any) -> None:
    body = {"model": "bard", "messages": USER, "max_tokens": 8, "seed": 1}
    whole = api.chat.completions.create(**body)
    chunks = list(api.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def test_tools(api: Any) -> None:
    answer = api.chat.completions.create(
        model="bard", messages=USER, tools=[WEATHER], tool_choice="required", max_tokens=100, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Verona")
    again = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert api.chat.completions.create(model="bard", messages=again, tools=[WEATHER], max_tokens=4).choices


def test_parsed_json_schema(api: Any) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=8, pattern="^[A-Z][a-z]{1,7}$")
        age: int = Field(ge=1, le=99)

    answer = api.chat.completions.parse(model="bard", messages=USER, response_format=Person, max_tokens=100)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and 1 <= person.age <= 99


def test_errors(api: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        api.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError) as raised:
        api.completions.create(model="bard", prompt="hi", max_tokens=10_000)
    assert raised.value.param == "max_tokens"


def test_thoughts_and_warnings_reach_the_client(thinking_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"model": "bard", "messages": USER, "max_tokens": 40, "temperature": 0}
        answer = client.chat.completions.create(**body, prediction={"type": "content", "content": "x"})
        assert answer.choices[0].message.reasoning_content and "prediction" in answer.warnings[0]
        chunks = [c.choices[0].delta for c in client.chat.completions.create(**body, stream=True)]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in chunks)
        assert thought == answer.choices[0].message.reasoning
        assert "".join(delta.content or "" for delta in chunks) == answer.choices[0].message.content


def test_calls_that_were_cut_are_known_as_such(api: Any) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    body = {"model": "bard", "messages": USER, "tools": [strict]}
    choice_of = {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(openai.LengthFinishReasonError) as raised:
        api.chat.completions.parse(**body, tool_choice=choice_of, max_tokens=40)
    (call,) = raised.value.completion.choices[0].message.tool_calls
    assert call.function.name == "weather" and call.function.arguments.startswith("{")


def test_responses(api: Any) -> None:
    first = api.responses.create(model="bard", input="Good morrow", max_output_tokens=12, temperature=0)
    assert first.output_text and first.usage.output_tokens == 12 and first.incomplete_details.reason
    second = api.responses.create(
        model="bard", input="And thou?", previous_response_id=first.id, max_output_tokens=12, temperature=0
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert api.responses.retrieve(second.id).output_text == second.output_text
    assert [item.content[0].text for item in api.responses.input_items.list(second.id)] == ["And thou?"]
    api.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(second.id)


def test_streamed_responses(api: Any, thinking_server: LiveServer) -> None:
    body = {"model": "bard", "input": "Good morrow", "max_output_tokens": 40, "temperature": 0}
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as other:
        for client in (api, other):
            events = list(client.responses.create(**body, stream=True))
            assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text == events[-1].response.output_text == client.responses.create(**body).output_text


def test_responses_with_functions_and_parsed_texts(api: Any) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=8, pattern="^[A-Z][a-z]{1,7}$")
        age: int = Field(ge=1, le=99)

    body = {"model": "bard", "input": "Good morrow", "max_output_tokens": 100, "temperature": 0}
    assert isinstance(api.responses.parse(**body, text_format=Person).output_parsed, Person)
    with api.responses.stream(**body, text_format=Person) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text and isinstance(final.output_parsed, Person)
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    with api.responses.stream(**body, tools=[tool], tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Verona")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    follow = {"model": "bard", "input": [result], "previous_response_id": final.id, "max_output_tokens": 8}
    assert api.responses.create(**follow, tools=[tool]).output_text is not None
