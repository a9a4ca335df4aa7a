"""Chat templates: those that came with a model, those that llmc has, and files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from llmc.engine_format import EngineFiles
from llmc.errors import OptionError
from llmc.files.tokenizer_files import SETTINGS, TEMPLATE_FOLDER

_DEFAULT, _TOOL_USE = "default", "tool_use"
_FOLDER = "tokenizer"

# For models that came without a template; named on the command line by the key.
BUILT_IN: Mapping[str, str] = {
    "plain": (
        "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text and the special tokens (bos_token, eos_token, …) that it may name.

    named: the model's templates by name; `tool_use` is for conversations with tools. call_example: an example call, for
    models whose template has no place for tools; None uses the template's form.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    call_example: str | None = None

    @property
    def tool_source(self) -> str:
        """The text of the template that conversations with tools are for."""
        return self.named.get(_TOOL_USE, self.source)

    def sources(self, tools: bool) -> list[str]:
        """The texts that a conversation may be rendered by, the likelier first. tools: whether it has any."""
        sources = [self.tool_source, self.source] if tools else [self.source, self.tool_source]
        return list(dict.fromkeys(sources))


def engine_template(engine: EngineFiles) -> ChatTemplate | None:
    """The template that came with the model, with the others that have names; None if it has none."""
    sources = _sources(engine)
    if not sources:
        return None
    name = _DEFAULT if _DEFAULT in sources else next(iter(sources))
    return ChatTemplate(sources[name], special_tokens(engine), sources)


def named_template(name: str, engine: EngineFiles) -> ChatTemplate:
    """A template of BUILT_IN, the model's of that name, or a file's. Raises OptionError if there is none."""
    own = {**_sources(engine), **BUILT_IN}
    if name in own:
        return ChatTemplate(own[name], special_tokens(engine))
    try:
        return ChatTemplate(Path(name).read_text(encoding="utf-8"), special_tokens(engine))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(
            f"the chat template cannot be read: {error}",
            at=f"chat_template={name!r:.120}",
            fix=f"name a Jinja file, or one of {', '.join(own)}",
        ) from None


def special_tokens(engine: EngineFiles) -> dict[str, str]:
    """The tokens that the tokenizer's files name, such as bos_token, as text."""
    files = (_settings(engine, "special_tokens_map.json"), _settings(engine, SETTINGS))
    named = {name: value for file in files for name, value in file.items() if name.endswith("_token") and value}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _sources(engine: EngineFiles) -> dict[str, str]:
    """The model's templates by name, from the tokenizer's settings and from files. Files take precedence, as in
    transformers."""
    sources = _named(_settings(engine, SETTINGS).get("chat_template"))
    sources = sources or _named(_settings(engine, "chat_template.json").get("chat_template"))
    file = f"{_FOLDER}/chat_template.jinja"
    if file in engine:
        sources[_DEFAULT] = engine.text(file)
    others = [name for name in engine.below(f"{_FOLDER}/{TEMPLATE_FOLDER}") if name.endswith(".jinja")]
    return {**sources, **{PurePosixPath(name).stem: engine.text(name) for name in others}}


def _named(value: Any) -> dict[str, str]:
    """Templates as settings have them: a text, a mapping from names to texts, or a list of names with texts."""
    if isinstance(value, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else [(_DEFAULT, value)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _settings(engine: EngineFiles, name: str) -> dict[str, Any]:
    file = f"{_FOLDER}/{name}"
    settings = engine.json(file) if file in engine else {}
    return settings if isinstance(settings, dict) else {}
