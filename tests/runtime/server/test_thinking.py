"""What a model thinks: cut into pieces at every place, over HTTP, streamed or not, with tools, grammars and limits.

The shipped model never writes tags, so the server is told that its thoughts end at the first comma.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from llmc.errors import OptionError
from llmc.runtime.server.thinking import TAGS, Thinking, ThinkingReader, is_begun, think_tags
from tests.runtime.server.test_chat import USER, WEATHER, chat
from tests.runtime.server.test_completions import complete, events
from tests.runtime.server.tool_calls.samples import said

THINK = TAGS["think"]

# output, whether the prompt opened the tag, what was thought, the answer
OUTPUTS: tuple[tuple[str, bool, str, str], ...] = (
    ("<think>\nI see.\n</think>\n\nYes", False, "I see.", "Yes"),
    ("I see.\n</think>\n\nYes", True, "I see.", "Yes"),
    ("\n<think>I see.</think>Yes", True, "I see.", "Yes"),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    ("  Yes", False, "", "  Yes"),
    ("<thin", False, "", "<thin"),
    ("<think>I  see </thi", False, "I  see </thi", ""),
    ("I see </b>\n", True, "I see </b>", ""),
    ("<think>\n\n</think>\n\nYes\n", False, "", "Yes\n"),
    ("</think> a </think>", True, "", "a </think>"),
    ("", True, "", ""),
)


@pytest.mark.parametrize("output, begun, thought, answer", OUTPUTS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_splitting_is_the_same_however_the_output_is_cut(
    output: str, begun: bool, thought: str, answer: str, size: int
) -> None:
    reader = ThinkingReader(Thinking(THINK, begun))
    pieces = [output[i : i + size] for i in range(0, len(output), size)] or [""]
    parsed = said(event for i, piece in enumerate(pieces) for event in reader.feed(piece, ended=i == len(pieces) - 1))
    assert (parsed.thoughts, parsed.text) == (thought, answer)


@pytest.mark.parametrize("output, begun, thought, answer", OUTPUTS)
def test_counting_agrees_with_splitting(output: str, begun: bool, thought: str, answer: str) -> None:
    count = Thinking(THINK, begun).tokens(range(len(output)), lambda i: output[i].encode())
    assert (count > 0) is ("<think>" in output[:9] or begun) & bool(output)
    assert output[count:].lstrip() == answer.lstrip()


def test_tags_follow_the_flag_and_the_template() -> None:
    assert think_tags("auto", "…{{ '<think>' }}…") == think_tags("qwen3", "") == THINK
    assert think_tags("auto", "content.split('</think>')") == THINK
    assert think_tags("auto", "{{ messages }}") is None and think_tags("none", "<think>") is None
    assert think_tags("[[ ]]", "") == type(THINK)("[[", "]]")
    with pytest.raises(OptionError, match="reasoning-parser"):
        think_tags("unicorn", "")


def test_where_a_prompt_begins_the_thinking() -> None:
    assert is_begun(THINK, "[assistant] <think>\n", None)
    assert not is_begun(THINK, "[assistant] <think>\n\n</think>\n\n", None)
    assert not is_begun(THINK, "[user] what is <think>? [assistant]", None)
    assert is_begun(THINK, "[assistant] <think>I see", "<think>I see")
    assert not is_begun(THINK, "[assistant] <think>I</think>see", "<think>I</think>see")


@pytest.fixture
def output(thinking: httpx.Client) -> str:
    """What the model says to USER, thoughts included, in 40 tokens."""
    prompt = chat(thinking, return_prompt_text=True)["prompt_text"]
    assert prompt.endswith("<think>")
    answer = complete(thinking, prompt=prompt, add_special_tokens=False, max_tokens=40, temperature=0)
    text: str = answer["choices"][0]["text"]
    assert "," in text
    return text


GREEDY = {"temperature": 0, "max_tokens": 40}


def test_thoughts_come_under_both_names(thinking: httpx.Client, output: str) -> None:
    answer = chat(thinking, **GREEDY)
    message = answer["choices"][0]["message"]
    thought, _, said = output.partition(",")
    assert message["reasoning"] == message["reasoning_content"] == thought.strip()
    assert message["content"] == said.lstrip()
    spent = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < spent < answer["usage"]["completion_tokens"] == 40


def test_streams_say_the_same(thinking: httpx.Client) -> None:
    whole = chat(thinking, **GREEDY)
    chunks = events(thinking, "/v1/chat/completions", messages=USER, **GREEDY, stream_options={"include_usage": True})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole["choices"][0]["message"][name]
    kinds = ["reasoning" in delta for delta in deltas if delta.get("content") or "reasoning" in delta]
    assert kinds == sorted(kinds, reverse=True)
    assert chunks[-1]["usage"] == whole["usage"]


def test_thoughts_can_be_left_out(thinking: httpx.Client) -> None:
    whole, without = chat(thinking, **GREEDY), chat(thinking, **GREEDY, include_reasoning=False)
    assert not {"reasoning", "reasoning_content"} & set(without["choices"][0]["message"])
    assert without["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]
    assert without["usage"] == whole["usage"]


def test_max_tokens_may_end_the_thinking(thinking: httpx.Client) -> None:
    choice = chat(thinking, temperature=0, max_tokens=2)["choices"][0]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"]
    assert choice["finish_reason"] == "length"
    forced = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    assert "tool_calls" not in chat(thinking, temperature=0, max_tokens=2, **forced)["choices"][0]["message"]


def test_stop_strings_end_thoughts_too(thinking: httpx.Client, output: str) -> None:
    stop = output.partition(",")[0].strip()[-3:]
    choice = chat(thinking, **GREEDY, stop=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None


def test_the_template_may_turn_thinking_off(thinking: httpx.Client) -> None:
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = chat(thinking, **GREEDY, **off)
        assert "reasoning" not in answer["choices"][0]["message"] and "warnings" not in answer
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    (warning,) = chat(thinking, max_tokens=2, reasoning_effort="high")["warnings"]
    assert "reasoning_effort" in warning


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, r"[0-9]{3}-[a-z]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
        ({"guided_json": {"enum": ["Romeo", "Juliet"]}}, '"(Romeo|Juliet)"'),
    ],
)
def test_grammars_hold_after_the_thinking(thinking: httpx.Client, fields: dict[str, Any], pattern: str) -> None:
    for off in ({}, {"reasoning_effort": "none"}):
        choice = chat(thinking, **fields, **off, temperature=0, max_tokens=200)["choices"][0]
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["message"]["content"])
        assert ("reasoning" in choice["message"]) is (not off)


def test_forced_calls_come_after_the_thinking(thinking: httpx.Client) -> None:
    # So that the thinking ends soon, whatever the model would say to these tools.
    (comma,) = thinking.post("/tokenize", json={"prompt": ",", "add_special_tokens": False}).json()["tokens"]
    for choice_of in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"tools": [WEATHER], "tool_choice": choice_of, "parallel_tool_calls": False, "max_tokens": 200}
        answer = chat(thinking, **body, temperature=0, logit_bias={str(comma): 20})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Verona")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_thoughts_of_earlier_turns_reach_the_template(thinking: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "Ay", "reasoning_content": "He greets me."}, *USER]
    prompt = chat(thinking, messages=messages, return_prompt_text=True)["prompt_text"]
    assert "[assistant] <think>He greets me.</think>Ay\n" in prompt


def test_unknown_fields_are_told_and_left_out(thinking: httpx.Client) -> None:
    answer = chat(thinking, max_toks=5, tools=[{"function": {"name": "f", "speed": 1}}])
    assert sorted(answer["warnings"]) == [
        "unknown field max_toks is ignored",
        "unknown field tools.0.function.speed is ignored",
    ]
    assert complete(thinking, prompt="The king", max_toks=5)["warnings"] == ["unknown field max_toks is ignored"]
    for route, body in (("/tokenize", {"prompt": "The king"}), ("/detokenize", {"tokens": [5]})):
        plain, told = (thinking.post(route, json=body | more).json() for more in ({}, {"foo": 1}))
        assert told == plain | {"warnings": ["unknown field foo is ignored"]}
    assert thinking.post("/v1/chat/completions", json={"max_toks": 5}).status_code == 400
