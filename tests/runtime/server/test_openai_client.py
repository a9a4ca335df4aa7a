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
