"""Conversations as an engine's tokens, by the model's chat template or another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.text.chat_template import ChatTemplate, TemplateRenderer

TEMPLATE_HELP = "a Jinja file, `plain` or `chatml`; default: the model's, else plain"


@dataclass(frozen=True)
class ConversationPrompt:
    """is_plain: whether conversations are shown as plain transcripts, since nothing says what the model was taught."""

    engine: Engine
    template: ChatTemplate
    renderer: TemplateRenderer
    is_plain: bool

    def token_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Up to where the answer begins. Raises RequestError for a template that fails."""
        return self.engine.tokenizer.encode(self.renderer.render(self.template, messages), add_special_tokens=False)

    def stops(self) -> tuple[str, ...]:
        """A plain transcript has no end token: the user's next line ends the answer."""
        from llmc.runtime.text.chat_template import BUILT_IN

        return ("\nUser:",) if self.template.source == BUILT_IN["plain"] else ()


@contextmanager
def conversation_prompt(engine: Engine, name: str | None) -> Iterator[ConversationPrompt]:
    """Of an open engine. name: of a template; None is the model's. Raises OptionError."""
    from llmc.runtime.text.chat_template import TemplateRenderer, engine_template, named_template

    files = engine.files
    template = engine_template(files) if name is None else named_template(name, files)
    is_plain = template is None
    renderer = TemplateRenderer(workers=1)
    try:
        yield ConversationPrompt(engine, template or named_template("plain", files), renderer, is_plain)
    finally:
        renderer.close()


def check_template(name: str | None) -> None:
    """Raise OptionError for a template that is neither built in nor a file that can be read, before there is an engine.

    name: None is the model's own.
    """
    from llmc.engine_format import EngineFiles
    from llmc.runtime.text.chat_template import named_template

    if name is not None:
        named_template(name, EngineFiles(Path(), {}))
