"""A server whose template teaches no form of tool calls says so: once at its start, and in answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.serve import close_model, open_model
from llmc.runtime.text.template_program import TOOLS_ARE_DESCRIBED
from tests.runtime.server.conftest import serving
from tests.runtime.server.test_chat import TIME, chat
from tests.runtime.server.tool_calls.test_over_http import USER, asked

UNTAUGHT = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}"

PLACELESS = "{# of a model without tools #}{% for m in messages %}{{ m.content }}\n{% endfor %}"


def test_an_unknown_form_is_said(engine_directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "untaught.jinja"
    template.write_text(UNTAUGHT)
    with serving(engine_directory, "--chat-template", str(template)) as live, live.client() as client:
        (warning,) = chat(client, tools=[TIME])["warnings"]
        assert "form of tool calls" in warning and "--tool-call-parser" in warning
        assert "warnings" not in chat(client) and "warnings" not in chat(client, tools=[TIME], tool_choice="none")
    assert live.log().count("--tool-call-parser NAME") == 1


@pytest.mark.parametrize(
    "parser, call", [(None, '<tool_call>\n{"name": "NAME"'), ("mistral_args", '[TOOL_CALLS]NAME[ARGS]{"ARGUMENT"')]
)
def test_tools_are_described_in_the_form_that_is_read(
    parser: str | None, call: str, engine_directory: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    template = tmp_path / "placeless.jinja"
    template.write_text(PLACELESS)
    options = ServeOptions(engine=engine_directory, chat_template=str(template), tool_call_parser=parser)
    model = open_model(options, CollectorRegistry())
    try:
        body = {"messages": USER, "tools": [TIME], "return_prompt_text": True, "max_tokens": 1}
        (answer,) = asked(model, "/v1/chat/completions", body)
    finally:
        close_model(model)
    assert call in answer["prompt_text"] and answer["warnings"] == [TOOLS_ARE_DESCRIBED]
    assert not [warning for warning in recwarn if "form of tool calls" in str(warning.message)]
