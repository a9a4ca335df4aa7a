"""Every form of tool calls: read however it is cut, and written by its grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.grammar.matcher import grammar_tokenizer, new_matcher
from llmc.runtime.server.tool_calls.call_grammar import call_grammar
from llmc.runtime.server.tool_calls.known_forms import FORMS, NAMES, form_of_template
from tests.runtime.server.tool_calls.samples import (
    AT_START,
    CALLS,
    NOW,
    ONE_CALL,
    TOOLS,
    WEATHER,
    Said,
    read,
    reader,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TOKENIZER = Path(__file__).parents[4] / "examples" / "models" / "bard-draft" / "tokenizer.json"


def test_every_form_has_a_sample() -> None:
    assert set(CALLS) | set(ONE_CALL) == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_the_example_of_a_form_is_a_call(form: str) -> None:
    example = FORMS[form].example
    for word, said in (("NAME", "weather"), ("ARGUMENT", "city"), ("VALUE", "Rome")):
        assert example.count(word) == 1
        example = example.replace(word, said)
    assert read(form, [example]) == Said(calls=(("weather", '{"city": "Rome"}'),))


@pytest.mark.parametrize("form", CALLS)
def test_calls_are_read(form: str) -> None:
    assert read(form, [CALLS[form]]) == Said("", (WEATHER, NOW))
    text = "" if form in AT_START else "Let me look. "
    assert read(form, [f"{text}\n{CALLS[form]}\n"]) == Said(f"{text}\n" if text else "", (WEATHER, NOW))


@pytest.mark.parametrize("form", ONE_CALL)
def test_one_call_is_read(form: str) -> None:
    assert read(form, [ONE_CALL[form]]) == Said("", (WEATHER,))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_reading_is_the_same_however_the_output_is_cut(form: str, data: st.DataObject) -> None:
    """Calls, their parts, marks and text in any order, ended or broken off."""
    whole = CALLS.get(form, "") or ONE_CALL[form]
    parts = st.sampled_from(
        [whole, *sorted(FORMS[form].marks), '{"name": "now"', '"', "\\", "\n", " a", "<", "}", ", "]
    )
    text = "".join(data.draw(st.lists(parts, max_size=5)))
    text = text[: data.draw(st.integers(0, len(text)))]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    cut = data.draw(st.booleans())
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(form, pieces, cut=cut) == read(form, [text], cut=cut) == read(form, [*text, ""], cut=cut)


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_are_cut_are_given_as_far_as_they_came(form: str) -> None:
    """At every place: what has come of a call is the beginning of it, and nothing of it is lost or told twice."""
    whole = CALLS.get(form) or ONE_CALL[form]
    told = "".join(name + arguments for name, arguments in read(form, [whole]).calls)
    longest = 0
    for end in range(len(whole)):
        calls = read(form, [whole[:end]], cut=True).calls
        so_far = "".join(name + arguments for name, arguments in calls)
        assert told.startswith(so_far) and len(so_far) >= longest
        longest = len(so_far)
    assert longest >= len(told) - len("now{}")


@pytest.mark.parametrize("form", FORMS)
def test_arguments_come_before_the_call_ends(form: str) -> None:
    """A long text is not held back."""
    whole = CALLS.get(form) or ONE_CALL[form]
    reading = reader(form)
    before, _, _ = whole.partition("ź")
    assert reading.feed(before)
    for _ in range(4):
        (event,) = reading.feed("long ")
        assert getattr(event, "text", "").strip() == "long"


@pytest.mark.parametrize("form", FORMS)
def test_a_call_of_an_unknown_function_is_text(form: str) -> None:
    whole = (CALLS.get(form) or ONE_CALL[form]).replace("weather", "rain").replace("now", "snow")
    parsed = read(form, [whole])
    assert not parsed.calls and "rain" in parsed.text


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    vocabulary = json.loads(TOKENIZER.read_text())
    size = len(vocabulary["model"]["vocab"]) + len(vocabulary["added_tokens"])
    return grammar_tokenizer(TOKENIZER, size, (0,))


def allows(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a text is a sentence of the grammar, byte for byte."""
    matcher = new_matcher(tokenizer, json.dumps({"grammars": [{"lark_grammar": grammar}]}))
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def spelled(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_writes_what_models_write(form: str, tokenizer: LLTokenizer) -> None:
    single = form in ONE_CALL
    whole = ONE_CALL[form] if single else CALLS[form]
    grammar = call_grammar(NAMES[form], TOOLS, spelled, single)
    assert allows(tokenizer, grammar, whole)
    assert not allows(tokenizer, grammar, f"Hm. {whole}")
    assert not allows(tokenizer, grammar, whole.replace("weather", "rain"))
    assert not allows(tokenizer, grammar, whole.replace("51.75", "north"))
    if not single:
        assert not allows(tokenizer, call_grammar(NAMES[form], TOOLS, spelled, single=True), whole)


TEMPLATES = {
    "openai": "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}",
    "kimi_k2": "{{ '<|tool_calls_section_begin|>' }}",
    "deepseek_v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>```json'}}",
    "deepseek_v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'}}",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="a">',
    "gemma4": "{{- '<|tool_call>call:' + name }}",
    "functiongemma": "<start_function_call>call:",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>",
    "glm47": "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>",
    "granite": "respond only with <|tool_call|> followed by a JSON list",
    "phi4_mini_json": 'formatted as functools[{"name"',
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "hermes": "… <tool_call> …",
    "pythonic": "[func_name1(params_name1=params_value1), func_name2(params)]",
    "llama3_json": '{"name": function name, "parameters": dictionary}',
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_form_follows_the_template(form: str) -> None:
    assert form_of_template(TEMPLATES[form]) is FORMS[form]


def test_no_mark_is_a_part_of_another_where_both_are_looked_for() -> None:
    for form in FORMS.values():
        openings = [section.opening for section in form.sections if not section.at_start]
        assert not [(a, b) for a in openings for b in openings if a != b and a in b], form.name
