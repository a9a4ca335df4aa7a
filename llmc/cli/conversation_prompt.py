"""Render conversations as an engine's tokens, with the model's chat template or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine

TEMPLATE_HELP = "chat template: a Jinja file, `plain` or `chatml`; default: the model's, or else plain"


@dataclass(frozen=True)
class ConversationPrompt:
    """Renders conversations for an open engine. template: as for Engine.chat. is_plain: whether conversations are
    rendered as plain transcripts, because the model has no chat template."""

    engine: Engine
    template: str | None
    is_plain: bool

    def token_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt's tokens, up to where the answer begins. Raises RequestError for a template that fails."""
        return self.engine.conversations.token_ids(messages, chat_template=self.template)

    def stops(self) -> tuple[str, ...]:
        """A plain transcript has no end token: the user's next line ends the answer."""
        from llmc.runtime.text.chat_template import BUILT_IN

        template = self.engine.conversations.template(self.template)
        return ("\nUser:",) if template.source == BUILT_IN["plain"] else ()


def conversation_prompt(engine: Engine, name: str | None) -> ConversationPrompt:
    """Return the form of prompts for an engine.

    name: a template; None is the model's, or `plain` for a model without one.
    """
    from llmc.runtime.text.chat_template import engine_template

    is_plain = name is None and engine_template(engine.files) is None
    return ConversationPrompt(engine, "plain" if is_plain else name, is_plain)


def check_template(name: str | None) -> None:
    """Raise OptionError for a template that is neither built in nor a file that can be read, before there is an engine.

    name: None is the model's own.
    """
    from llmc.engine_format import EngineFiles
    from llmc.runtime.text.chat_template import named_template

    if name is not None:
        named_template(name, EngineFiles(Path(), {}))
