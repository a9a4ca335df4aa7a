"""The forms of conversations: each template gets one in which nothing is lost, or is said to lose something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from llmc.errors import LoadWarning, RequestError
from llmc.runtime.text.chat_template import BUILT_IN, ChatTemplate
from llmc.runtime.text.chat_template_worker import template_environment
from llmc.runtime.text.conversation_form import ConversationForm
from llmc.runtime.text.form_search import fit
from llmc.runtime.text.normal_messages import normal_messages
from llmc.runtime.text.template_program import TOOLS_ARE_DESCRIBED
from llmc.runtime.text.template_renderer import TemplateFit, TemplateInput, TemplateRenderer, warn_of_template
from tests.runtime.text.template_families import FAMILIES, FORMS

Json = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


def call(identity: str | None, name: str, arguments: str) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


TOOLS = [tool("wordtool", description="wordpurpose"), tool("wordother")]
# A conversation as agents send it, with a word of its own in every text.
AGENT: list[Json] = [
    says("system", "wordsystem"),
    says("developer", [{"type": "text", "text": "worddeveloper"}]),
    says("user", "wordquestion"),
    says("user", "wordrequest"),
    says(
        "assistant",
        None,
        reasoning="I wonder",
        tool_calls=[
            call("call_a", "wordfirst", '{"city": "wordrome", "days": null, "sure": true}'),
            call("call_b", "wordsecond", '{"city": "wordverona"}'),
        ],
    ),
    says("tool", [{"type": "text", "text": "word"}, {"type": "text", "text": "sunny"}], tool_call_id="call_a"),
    says("tool", "wordrain", tool_call_id="call_b"),
    # A call that max_tokens has cut, beside a text.
    says("assistant", "wordlook", tool_calls=[call(None, "wordthird", '{"city": "wordparis')]),
    says("tool", None),
    says("user", "wordthanks"),
    says("assistant", ""),
    says("user", "wordhello"),
    says("system", "wordlater"),
    says("assistant", "wordanswer"),
    says("assistant", "wordreply"),
    says("user", "wordend"),
]
WORDS = [
    *("wordsystem", "worddeveloper", "wordquestion", "wordrequest", "wordrome", "wordverona", "wordsunny", "wordrain"),
    *("wordlook", "wordparis", "wordthanks", "wordhello", "wordlater", "wordanswer", "wordreply", "wordend"),
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    opened = TemplateRenderer(workers=1)
    yield opened
    opened.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_form(family: str) -> None:
    template = template_environment().from_string(FAMILIES[family])
    fitted = fit(FAMILIES[family], lambda variables: template.render(**TOKENS, **variables), TOKENS["eos_token"])
    assert fitted.form == replace(ConversationForm(), **FORMS[family])  # type: ignore[arg-type]
    assert not fitted.lacks


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
def test_nothing_is_lost_of_an_agents_conversation(
    family: str, tools: list[Json] | None, renderer: TemplateRenderer
) -> None:
    template = ChatTemplate({**FAMILIES, **BUILT_IN}[family], TOKENS)
    rendered = renderer.render(template, TemplateInput(AGENT, tools))
    counts = {word: rendered.text.count(word) for word in WORDS}
    assert counts == dict.fromkeys(WORDS, 1), rendered.text
    assert all(name in rendered.text for name in ("wordfirst", "wordsecond", "wordthird"))
    assert "None" not in rendered.text and "True" not in rendered.text
    assert not tools or ("wordpurpose" in rendered.text and "wordother" in rendered.text)
    described = tools and "wordpurpose" not in renderer.render(template, TemplateInput(AGENT[:3], None)).text
    assert rendered.warnings in ((), (TOOLS_ARE_DESCRIBED,)) and (described or not rendered.warnings)


def test_the_wanted_ids_and_names_of_results(renderer: TemplateRenderer) -> None:
    talk = [says("user", "hi"), AGENT[4], *AGENT[5:7]]
    source = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }} {{ m.tool_call_id }};{% endfor %}"
    shown = renderer.render(ChatTemplate(source), TemplateInput(talk)).text
    assert "tool wordfirst wordsunny call_a;" in shown and "tool wordsecond wordrain call_b;" in shown
    short = renderer.render(ChatTemplate(FAMILIES["mistral-v3"]), TemplateInput(talk)).text
    ids = {part[:9] for part in short.split("wordsunny")[1:]} | {part[:9] for part in short.split("wordrain")[1:]}
    assert len(ids) == 2 and all(short.count(identity) == 2 and identity.isalnum() for identity in ids)
    named = renderer.render(ChatTemplate(FAMILIES["kimi-k2"]), TemplateInput(talk)).text
    assert "functions.wordfirst:0" in named and "functions.wordsecond:1" in named


def test_tools_without_a_place_are_described_as_the_model_writes_calls(renderer: TemplateRenderer) -> None:
    given = TemplateInput([says("system", "Be brief."), says("user", "hi")], TOOLS)
    shown = renderer.render(ChatTemplate(FAMILIES["deepseek-v3"]), given).text
    assert '<call>NAME<sep>{"ARGUMENT": "VALUE"}</call>' in shown and shown.count("<|system|>") == 1
    mistral = ChatTemplate(FAMILIES["deepseek-v3"], call_example="[TOOL_CALLS]NAME[ARGS]{}")
    assert "in this form, once for each call:\n[TOOL_CALLS]NAME[ARGS]{}" in renderer.render(mistral, given).text
    plain = ChatTemplate(BUILT_IN["chatml"], call_example='[TOOL_CALLS]NAME[ARGS]{"ARGUMENT": "VALUE"}')
    again = renderer.render(plain, TemplateInput([*given.messages, AGENT[4]], TOOLS)).text
    assert "[TOOL_CALLS]wordfirst[ARGS]{" in again and "[TOOL_CALLS]wordsecond[ARGS]{" in again
    assert "<tool_call>" not in again
    hermes = renderer.render(ChatTemplate(BUILT_IN["chatml"]), given).text
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in hermes
    granite = renderer.render(ChatTemplate(FAMILIES["granite-3"]), TemplateInput([*given.messages, AGENT[4]])).text
    calls = json.loads(granite.split("<|tool_call|>")[1])
    assert [tool_call["name"] for tool_call in calls] == ["wordfirst", "wordsecond"]


def test_what_no_form_shows_is_told_and_refused(renderer: TemplateRenderer) -> None:
    last = ChatTemplate("{{ messages[-1].content }}")
    with pytest.warns(LoadWarning, match="does not show earlier turns, .*: requests with that are refused"):
        warn_of_template(lambda: renderer.fit(last))
    assert renderer.render(last, TemplateInput([says("user", "hi")])).text == "hi"
    talk = [says("user", "hi"), says("assistant", "yes"), says("user", "why")]
    with pytest.raises(RequestError, match=r"does not show message 0 \('user'\)"):
        renderer.render(last, TemplateInput(talk))
    silent = ChatTemplate("constant")
    assert renderer.fit(silent).lacks == ("what a user says",)
    with pytest.raises(RequestError, match="does not show message 0"):
        renderer.render(silent, TemplateInput(talk))
    twice = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="writes 2 times message 0"):
        renderer.render(twice, TemplateInput(talk))
    # Variables of the request may be what the template lacks.
    needs = ChatTemplate("{{ 'x' + city }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="'city' is undefined"):
        renderer.render(needs, TemplateInput(talk))
    assert renderer.render(needs, TemplateInput(talk, extra={"city": "Rome"})).text == "xRomehiyeswhy"


def test_a_template_for_tools_is_for_conversations_with_them(renderer: TemplateRenderer) -> None:
    named = {"default": FAMILIES["phi-3"], "tool_use": FAMILIES["tool-use"]}
    template = ChatTemplate(named["default"], {}, named)
    plain = renderer.render(template, TemplateInput([says("user", "hi")])).text
    assert "<tools>" not in plain and "<|end|>" in plain
    for given in (TemplateInput([says("user", "hi")], TOOLS), TemplateInput([says("user", "hi"), *AGENT[4:7]])):
        rendered = renderer.render(template, given)
        assert rendered.text.startswith("<tools>") and not rendered.warnings
    assert renderer.fit(template) == TemplateFit((), describes_tools=False)
    assert renderer.fit(ChatTemplate(FAMILIES["phi-3"])).describes_tools


def test_prompts_end_inside_the_last_message_in_every_form(renderer: TemplateRenderer) -> None:
    talk = [says("user", "hi"), says("assistant", "It is")]
    given = TemplateInput(talk, add_generation_prompt=False, continue_final_message=True)
    for family in ("chatml", "gemma-2", "parts"):
        assert renderer.render(ChatTemplate(FAMILIES[family], TOKENS), given).text.endswith("It is")


def test_older_forms_of_calls_are_read() -> None:
    older = [
        says("assistant", None, function_call={"name": "f", "arguments": "{}"}),
        says("function", "1", name="f"),
        {"role": "assistant", "content": None, "refusal": "I will not", "tool_calls": []},
    ]
    called, result, refused = normal_messages(older)
    assert (
        called["tool_calls"] == [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        and called["content"] == ""
    )
    assert result == {"role": "tool", "content": "1", "name": "f", "tool_call_id": "call_0"}
    assert refused == {"role": "assistant", "content": "I will not"}


def test_what_is_no_text_stays(renderer: TemplateRenderer) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "image", "image": "x.png"}]
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }} parts"
    )
    shown = renderer.render(
        ChatTemplate(source + "{% endif %}{{ m.mood }}{% endfor %}"), TemplateInput([says("user", parts, mood="!")])
    )
    assert shown.text == "2 parts!"
