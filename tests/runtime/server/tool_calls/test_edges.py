"""Tool calls that models get half right, and what only looks like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmc.errors import OptionError
from llmc.runtime.server.tool_calls.chosen_form import chosen_form
from llmc.runtime.server.tool_calls.known_forms import FORMS
from llmc.runtime.server.tool_calls.literals import GEMMA, PYTHON, Dialect, NotLiteral, value_of
from llmc.runtime.server.tool_calls.tools import tools_of
from llmc.runtime.server.tool_calls.typed_text import typed_value
from tests.runtime.server.tool_calls.samples import NOW, Said, read

# form, output, what it says
OUTPUTS: tuple[tuple[str, str, Said], ...] = (
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', Said(calls=(NOW,))),
    ("hermes", '<tool_call>{"name": "now"}', Said(calls=(NOW,))),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', Said(calls=(NOW,))),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', Said(calls=(("now", '{"a": 1}'),))),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Said(calls=(("now", '{"a": 1}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "x </tool_call> y"}}</tool_call>',
        Said(calls=(("now", '{"a": "x </tool_call> y"}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "x\n}"}}</tool_call>',
        Said(calls=(("now", '{"a": "x\\n}"}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        Said(calls=(NOW,)),
    ),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]', Said(calls=(NOW, NOW))),
    ("hermes", '\n\n<tool_call>{"name": "now"}</tool_call>\n', Said(calls=(NOW,))),
    ("hermes", "<tool_call>oh</tool_call> no", Said("<tool_call>oh</tool_call> no")),
    ("hermes", '<tool_call>{"name": "now", "arguments": 5}', Said('<tool_call>{"name": "now", "arguments": 5}')),
    ("hermes", "a < b, <tool", Said("a < b, <tool")),
    ("hermes", "\n a \n", Said("\n a \n")),
    ("hermes", "  ", Said("  ")),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": null}]', Said(calls=(NOW,))),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}", Said(calls=(NOW,))),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]null", Said(calls=(NOW,))),
    ("mistral_args", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}", Said(calls=(NOW,))),
    ("mistral_args", '[TOOL_CALLS]now{"a": 1}', Said(calls=(("now", '{"a": 1}'),))),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]", Said(calls=(NOW,))),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', Said(calls=(NOW, NOW))),
    ("llama3_json", 'See {"name": "now"}', Said('See {"name": "now"}')),
    ("llama3_json", '{"city": 1}', Said('{"city": 1}')),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', Said('{"name": "Ann", "parameters": {}}')),
    ("llama3_json", "<|python_start|>[now()]<|python_end|>", Said(calls=(NOW,))),
    ("pythonic", "[1] see now()", Said("[1] see now()")),
    ("pythonic", "[now(), now()]", Said(calls=(NOW, NOW))),
    ("pythonic", "[now(None)]", Said(calls=(NOW,))),
    ("pythonic", "```tool_code\nnow()\n```", Said(calls=(NOW,))),
    (
        "pythonic",
        "[now(a='it\\'s', b=[1, (2, None)], c={'k': True})]",
        Said(calls=(("now", '{"a": "it\'s", "b": [1, [2, null]], "c": {"k": true}}'),)),
    ),
    ("pythonic", '[weather("Rome", days=2)]', Said(calls=(("weather", '{"city": "Rome", "days": 2}'),))),
    ("pythonic", "[weather(city=Rome)]", Said(calls=(("weather", '{"city": "Rome"}'),))),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", Said(calls=(NOW,))),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a } <tool_call|> b<|"|>,days:null}<tool_call|>',
        Said(calls=(("weather", '{"city": "a } <tool_call|> b", "days": null}'),)),
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", Said(calls=(NOW,))),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        Said(calls=(NOW,)),
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said(calls=(NOW,)),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|><|tool_call_end|>",
        Said(calls=(NOW,)),
    ),
    (
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\na </parameter> </tool_call>\n b\n</parameter>\n</function>",
        Said(calls=(("weather", '{"city": "a </parameter> </tool_call>\\n b"}'),)),
    ),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", Said(calls=(NOW,))),
    ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', Said(calls=(NOW,))),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>",
        Said(calls=(("weather", '{"city": "12", "days": 12}'),)),
    ),
    ("glm45", "<tool_call>now</tool_call>", Said(calls=(NOW,))),
    (
        "glm47",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>null</arg_value></tool_call>",
        Said(calls=(("weather", '{"city": "null"}'),)),
    ),
)


@pytest.mark.parametrize("form, output, found", OUTPUTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_models_write(form: str, output: str, found: Said, size: int) -> None:
    pieces = [output[i : i + size] for i in range(0, len(output), size)]
    assert read(form, pieces) == found


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    "output, found",
    [
        (f"{THOUGHT}{FINAL}Yes.<|return|>", Said("Yes.", (), "Hm.")),
        (f"{THOUGHT}<|start|>assistant{CALL}{{}}<|call|>", Said("", (NOW,), "Hm.")),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}Yes.", Said("Yes.", (), "Hm.\n\nHm.")),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}null<|call|>",
            Said("I look.", (NOW,)),
        ),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", Said("", (NOW,))),
        (f"<|start|>assistant to=now{CALL.split(' ')[0]}<|message|>{{}}", Said("", (NOW,))),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", Said("", (), "1 + 1")),
        ("Just text.", Said("Just text.")),
        (f"{CALL}[1", Said("", (NOW,))),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_calls_in_channels(output: str, found: Said, size: int) -> None:
    pieces = [output[i : i + size] for i in range(0, len(output), size)]
    assert read("openai", pieces) == found


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "is_on": {"type": "boolean"},
        "items": {"type": "array"},
        "where": {"$ref": "#/$defs/where"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "level": {"enum": ["1", 2]},
        "any": {},
    },
    "$defs": {"where": {"type": "object"}},
}


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("text", "5", "5"),
        ("text", " null", " null"),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "five", "five"),
        ("count", "null", None),
        ("share", "5", 5),
        ("share", "1e400", "1e400"),
        ("share", "0.5", 0.5),
        ("is_on", "true", True),
        ("is_on", "False", False),
        ("items", "['a', 1]", ["a", 1]),
        ("items", '["a", 1]', ["a", 1]),
        ("where", "{'a': {'b': None}}", {"a": {"b": None}}),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("level", "1", "1"),
        ("level", "2", 2),
        ("any", "[1]", [1]),
        ("any", "some text", "some text"),
        ("other", "true", True),
    ],
)
def test_plain_text_gets_the_type_of_the_schema(name: str, text: str, value: Any) -> None:
    (function,) = tools_of({"f": SCHEMA}).values()
    parsed = typed_value(text, function, name)
    assert parsed == value and type(parsed) is type(value)
    json.dumps(parsed, allow_nan=False)


@pytest.mark.parametrize(
    "dialect, text, value",
    [
        (PYTHON, r"'a\n\x41\u00e9\q'", "a\nA\u00e9\\q"),
        (PYTHON, '"""a "b" c"""', 'a "b" c'),
        (PYTHON, "[-1, +2.5, 1e3, .5]", [-1, 2.5, 1000.0, 0.5]),
        (PYTHON, "{'a': (1,), 2: []}", {"a": [1], "2": []}),
        (GEMMA, '{a:<|"|>x, y<|"|>,b:[true,null]}', {"a": "x, y", "b": [True, None]}),
    ],
)
def test_values_of_literals(dialect: Dialect, text: str, value: Any) -> None:
    assert value_of(text, dialect) == value


@pytest.mark.parametrize("text", ["[1, 2", "'a", "{1, 2}", "[1] 2", "[" * 500, ""])
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(NotLiteral):
        value_of(text, PYTHON)


def test_the_form_is_the_asked_one_or_the_templates() -> None:
    assert chosen_form("llama4_pythonic", "<tool_call>").form is FORMS["pythonic"]
    assert chosen_form(None, "{% if tools %}<tool_call>{% endif %}").is_known
    assert chosen_form(None, "{{ messages }}").is_known
    unknown = chosen_form(None, "{% if tools %}{{ tools }}{% endif %}")
    assert unknown.form is FORMS["hermes"] and not unknown.is_known
    with pytest.raises(OptionError, match="tool-call-parser cannot be 'hermis'") as raised:
        chosen_form("hermis", "")
    assert "hermes" in str(raised.value.fix)
