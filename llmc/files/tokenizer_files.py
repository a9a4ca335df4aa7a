"""The files of a model directory that belong to its tokenizer, chat templates included."""

from collections.abc import Iterator
from pathlib import Path

TOKENIZER, SETTINGS, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
# One file per template other than the default, named after it.
TEMPLATE_FOLDER = "additional_chat_templates"
_FILES = (TOKENIZER, SETTINGS, "chat_template.jinja", "chat_template.json", GENERATION, SPECIAL_TOKENS)


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The files that the directory has, named templates last."""
    return tuple(file for file in _places(directory) if file.is_file())


def name_of(file: Path) -> str:
    """The name of a file in an engine's folder `tokenizer` or in an export."""
    return f"{TEMPLATE_FOLDER}/{file.name}" if file.parent.name == TEMPLATE_FOLDER else file.name


def _places(directory: Path) -> Iterator[Path]:
    yield from (directory / name for name in _FILES)
    yield from sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
