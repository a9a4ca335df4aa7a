"""A session of LangChain's ChatOpenAI with a server: answers, streams, tools and their round trip.

Run by a Python that has langchain-openai: `python langchain_session.py http://127.0.0.1:8000/v1`.
"""

import importlib
import sys
from typing import Any

openai: Any = importlib.import_module("langchain_openai")
messages: Any = importlib.import_module("langchain_core.messages")
tools: Any = importlib.import_module("langchain_core.tools")


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days} days"


def main(url: str) -> None:
    for responses in (False, True):
        converse(
            openai.ChatOpenAI(
                model="bard",
                base_url=url,
                api_key="none",
                max_tokens=80,
                temperature=0,
                max_retries=0,
                use_responses_api=responses,
            )
        )
    print("ok")


def converse(model: Any) -> None:
    """A question, a stream, a schema, and a call whose result goes back, with a later message of the system."""
    asked = [messages.SystemMessage("Be brief."), messages.HumanMessage("Good morrow")]
    whole = model.invoke(asked)
    assert whole.text and whole.usage_metadata["output_tokens"] > 0, whole
    streamed = "".join(chunk.text for chunk in model.stream(asked))
    assert streamed == whole.text, (streamed, whole.text)
    schema = {
        "title": "Person",
        "description": "A person",
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    person = model.with_structured_output(schema, method="json_schema").invoke(asked)
    assert 1 <= person["age"] <= 99, person
    tool = tools.tool(weather)
    calling = model.bind_tools([tool], tool_choice="any", parallel_tool_calls=False)
    call = calling.invoke(asked)
    assert [made_call["name"] for made_call in call.tool_calls + call.invalid_tool_calls] == ["weather"], call
    made = call.tool_calls + call.invalid_tool_calls
    result = messages.ToolMessage(content=[{"type": "text", "text": "sunny"}], tool_call_id=made[0]["id"])
    later = [messages.SystemMessage("Answer in verse."), messages.HumanMessage("And tomorrow?")]
    again = model.bind_tools([tool]).invoke([*asked, call, result, *later])
    assert again.usage_metadata["input_tokens"] > call.usage_metadata["input_tokens"], again
    cut = calling.bind(max_tokens=12).invoke(asked)
    assert model.invoke([*asked, cut, *answers_to(cut), messages.HumanMessage("Go on")]).usage_metadata


def answers_to(message: Any) -> list[Any]:
    """A result for each call of a message, those that were cut included."""
    made = [*message.tool_calls, *message.invalid_tool_calls]
    return [messages.ToolMessage(content="cut", tool_call_id=tool_call["id"]) for tool_call in made]


if __name__ == "__main__":
    main(sys.argv[1])
