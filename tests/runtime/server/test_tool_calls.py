"""A server whose template teaches no form of tool calls says so: once at its start, and in answers."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.server.conftest import serving
from tests.runtime.server.test_chat import TIME, chat

UNTAUGHT = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}"


def test_an_unknown_form_is_said(engine_directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "untaught.jinja"
    template.write_text(UNTAUGHT)
    with serving(engine_directory, "--chat-template", str(template)) as live, live.client() as client:
        (warning,) = chat(client, tools=[TIME])["warnings"]
        assert "form of tool calls" in warning and "--tool-call-parser" in warning
        assert "warnings" not in chat(client) and "warnings" not in chat(client, tools=[TIME], tool_choice="none")
    assert live.log().count("--tool-call-parser NAME") == 1
