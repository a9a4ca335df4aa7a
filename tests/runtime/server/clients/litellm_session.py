"""A session of LiteLLM with a server: chat, streams, tools and their round trip, the Responses API.

Run by a Python that has litellm: `python litellm_session.py http://127.0.0.1:8000/v1`.
"""

import importlib
import sys
from typing import Any

litellm: Any = importlib.import_module("litellm")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Verona"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    # As its clients mark what Anthropic's servers should cache.
    "cache_control": {"type": "ephemeral"},
}


def main(url: str) -> None:
    # Both ways to name a server of OpenAI's kind.
    for provider in ("openai", "hosted_vllm"):
        converse({"model": f"{provider}/bard", "api_base": url, "api_key": "none", "max_retries": 0, "temperature": 0})
    print("ok")


def converse(server: dict[str, Any]) -> None:
    asked = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Good morrow"},
    ]
    whole = litellm.completion(**server, messages=asked, max_tokens=12)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 12, whole
    chunks = litellm.completion(**server, messages=asked, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    told = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    call = litellm.completion(**server, messages=asked, max_tokens=60, **told).choices[0].message
    assert call.tool_calls[0].function.name == "weather", call
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "name": "weather", "content": "sunny"}
    again = [*asked, call.model_dump(), result, {"role": "developer", "content": "In verse."}, asked[1]]
    assert litellm.completion(**server, messages=again, max_tokens=4, tools=[WEATHER]).choices
    cut = litellm.completion(**server, messages=asked, max_tokens=8, **told).choices[0].message
    assert litellm.completion(**server, messages=[*asked, cut.model_dump(), asked[1]], max_tokens=4).choices
    response = litellm.responses(**server, input="Good morrow", max_output_tokens=12)
    assert response.output[0].content[0].text, response


if __name__ == "__main__":
    main(sys.argv[1])
