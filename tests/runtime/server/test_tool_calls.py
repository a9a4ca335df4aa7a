"""Tool calls in text: whole, cut into pieces at every place, and text that only looks like one."""

from __future__ import annotations

import json

import pytest

from llmc.runtime.server.parsed_calls import ParsedCall
from llmc.runtime.server.tool_calls import (
    FORMS,
    RequiredCallsReader,
    ToolCallReader,
    form_of_template,
    required_schema,
)

NAMES = frozenset({"weather", "time"})
WEATHER = ParsedCall("weather", '{"city": "Łódź"}')
TIME = ParsedCall("time", "{}")

# form, output, its text, its calls
OUTPUTS: tuple[tuple[str, str, str, list[ParsedCall]], ...] = (
    (
        "hermes",
        'Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>',
        "Wait. ",
        [WEATHER],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
        "",
        [WEATHER, TIME],
    ),
    ("hermes", '<tool_call>{"name": "time"}', "", [TIME]),
    ("hermes", "<tool_call>oh</tool_call> no", "<tool_call>oh</tool_call> no", []),
    ("hermes", "a < b, <tool", "a < b, <tool", []),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
    ("mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}}]', "", [TIME]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Łódź"}}', "", [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time"}', "", [TIME, TIME]),
    ("llama3_json", 'See {"name": "time"}', 'See {"name": "time"}', []),
    ("llama3_json", '{"city": 1}', '{"city": 1}', []),
)


@pytest.mark.parametrize("form, output, text, calls", OUTPUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reading_is_the_same_however_the_output_is_cut(
    form: str, output: str, text: str, calls: list[ParsedCall], size: int
) -> None:
    reader = ToolCallReader(FORMS[form], NAMES)
    parts = [reader.feed(output[i : i + size]) for i in range(0, len(output), size)] + [reader.finish()]
    assert "".join(part[0] for part in parts) == text
    assert [call for part in parts for call in part[1]] == calls


def test_text_is_not_held_back_longer_than_it_has_to_be() -> None:
    reader = ToolCallReader(FORMS["hermes"], NAMES)
    assert reader.feed("It is 5 <")[0] == "It is 5 "
    assert reader.feed(" 6")[0] == "< 6"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_required_calls_come_one_by_one(size: int) -> None:
    output = json.dumps([{"name": "weather", "parameters": {"city": "a, ] b"}}, {"name": "time", "parameters": {}}])
    reader = RequiredCallsReader(NAMES)
    calls = [call for i in range(0, len(output), size) for call in reader.feed(output[i : i + size])]
    assert calls == [ParsedCall("weather", '{"city": "a, ] b"}'), TIME]


# form, output that max_tokens cut, its text, its calls
CUT: tuple[tuple[str, str, str, list[ParsedCall]], ...] = (
    ("hermes", 'a <tool_call>{"name": "weather", "arguments": {"ci', "a ", [ParsedCall("weather", '{"ci')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": 1}', "", [ParsedCall("weather", '{"city": 1}')]),
    ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {', '<tool_call>{"name": "unknown", "arguments": {', []),
    ("hermes", "<tool_c", "<tool_c", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "R',
        "",
        [TIME, ParsedCall("weather", '{"city": "R')],
    ),
    ("llama3_json", '{"name": "weather", "parameters": {"city"', "", [ParsedCall("weather", '{"city"')]),
    ("llama3_json", '{"city": "wea', '{"city": "wea', []),
)


@pytest.mark.parametrize("form, output, text, calls", CUT)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_calls_that_were_cut_are_given_as_far_as_they_came(
    form: str, output: str, text: str, calls: list[ParsedCall], size: int
) -> None:
    reader = ToolCallReader(FORMS[form], NAMES)
    parts = [reader.feed(output[i : i + size]) for i in range(0, len(output), size)] + [reader.finish(cut=True)]
    assert "".join(part[0] for part in parts) == text
    assert [call for part in parts for call in part[1]] == calls


def test_required_calls_that_were_cut() -> None:
    whole, begun = '[{"name": "time", "parameters": {}}', ', {"name": "weather", "parameters": {"city": "Ro'
    reader = RequiredCallsReader(NAMES)
    assert reader.feed(whole + begun) == [TIME]
    assert reader.finish() == ("", [ParsedCall("weather", '{"city": "Ro')])
    reader = RequiredCallsReader(NAMES)
    assert reader.feed('[{"name": "wea') == [] and reader.finish() == ('{"name": "wea', [])


def test_the_form_follows_the_template() -> None:
    assert form_of_template("… <tool_call> …") is FORMS["hermes"]
    assert form_of_template("[AVAILABLE_TOOLS] [TOOL_CALLS]") is FORMS["mistral"]
    assert form_of_template('{"name": function name, "parameters": dictionary}') is FORMS["llama3_json"]
    assert form_of_template("{{ messages }}") is FORMS["hermes"]


@pytest.mark.parametrize("most", [None, 1])
def test_required_calls_may_be_one_at_most(most: int | None) -> None:
    schema = required_schema({"time": {"type": "object"}}, most)
    assert schema["minItems"] == 1 and schema.get("maxItems") == most and ("maxItems" in schema) == (most is not None)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "time"}]
