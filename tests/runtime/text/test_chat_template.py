"""Chat templates: what transformers renders, and bombs that must not outlive their deadline or memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import OptionError, RequestError
from llmc.runtime.text.chat_template import (
    BUILT_IN,
    ChatTemplate,
    engine_template,
    named_template,
)
from llmc.runtime.text.template_renderer import TemplateInput, TemplateRenderer
from tests.listed_files import listed_files
from tests.quick_sample import quick_sample

MESSAGES = [{"role": "user", "content": "What's 2 < 3?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
HF_STYLE = (
    "{{ bos_token }}{%- for message in messages -%}\n"
    "    {%- if message.role == 'skip' %}{% continue %}{% endif -%}\n"
    "    {% generation %}[{{ message.role }}] {{ message.content | trim }}{% endgeneration %}\n"
    "{%- endfor %}\n"
    "{%- if tools %} {{ tools | tojson }}{% endif %}"
    "{%- if add_generation_prompt %} [assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    opened = TemplateRenderer(workers=1)
    yield opened
    opened.close()


def test_renders_what_transformers_renders(renderer: TemplateRenderer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*MESSAGES, {"role": "skip", "content": "x"}, {"role": "assistant", "content": " Łódź "}]
    cases: tuple[list[Any] | None, ...] = (None, [TOOL])
    for tools in cases:
        expected = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=HF_STYLE, add_generation_prompt=True, bos_token="<s>"
        )[0][0]
        assert (
            renderer.render(ChatTemplate(HF_STYLE, {"bos_token": "<s>"}), TemplateInput(messages, tools)).text
            == expected
        )


def test_built_in_templates_and_continuing(renderer: TemplateRenderer) -> None:
    plain = ChatTemplate(BUILT_IN["plain"])
    assert renderer.render(plain, TemplateInput(MESSAGES)).text == "User: What's 2 < 3?\nAssistant:"
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    given = TemplateInput(begun, add_generation_prompt=False, continue_final_message=True)
    assert renderer.render(plain, given).text == "User: What's 2 < 3?\nAssistant: It is"


BOMBS = {
    "endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one huge string": "{{ 'x' * 3000000000 }}",
    "a doubling text": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "huge output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "huge number": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


# Two take all the time that they are given.
@pytest.mark.parametrize("name", quick_sample(BOMBS, {*BOMBS} - {"endless loop"}))
def test_bombs_are_refused_and_the_next_chat_is_served(name: str, renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError, match="chat template"):
        renderer.render(ChatTemplate(BOMBS[name]), TemplateInput(MESSAGES))
    assert renderer.render(ChatTemplate(BUILT_IN["plain"]), TemplateInput(MESSAGES)).text.startswith("User:")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{% if %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_escapes_and_broken_templates_are_refused(source: str, renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError, match="chat template fails"):
        renderer.render(ChatTemplate(source), TemplateInput(MESSAGES))


def test_a_bomb_does_not_hold_up_other_chats() -> None:
    import threading

    renderer = TemplateRenderer(workers=2, seconds=600.0)
    renderer.warm()
    bomb = threading.Thread(target=_explode, args=(renderer,))
    bomb.start()
    renderer.render(ChatTemplate(BUILT_IN["plain"]), TemplateInput(MESSAGES))
    assert bomb.is_alive(), "the chat waited for the bomb"
    renderer.close()
    bomb.join()


def _explode(renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError):
        renderer.render(ChatTemplate(BOMBS["endless loop"]), TemplateInput(MESSAGES))


def test_templates_of_an_engine(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    assert engine_template(listed_files(tmp_path)) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": ["no text"]}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"default": "D", "tool_use": "T"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert engine_template(listed_files(tmp_path)) == ChatTemplate("D", tokens, names)
    (folder / "chat_template.jinja").write_text("J")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    template = engine_template(listed_files(tmp_path))
    assert template == ChatTemplate("J", tokens, {**names, "default": "J", "rag": "R"})
    assert template.sources(True) == ["T", "J"] and template.sources(False) == ["J", "T"]
    assert named_template("rag", listed_files(tmp_path)).source == "R"
    (tmp_path / "mine.jinja").write_text("M")
    assert named_template(str(tmp_path / "mine.jinja"), listed_files(tmp_path)).source == "M"
    with pytest.raises(OptionError, match="chat template"):
        named_template("absent.jinja", listed_files(tmp_path))
