"""A GGUF file as a model directory: config.json and the tokenizer made of its metadata, and links to its weights.

They are kept under LLMC_CACHE_DIR/gguf, named after the file's place, size and time, so that a file that changes is
read again. Weights stay where they are.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmc.cache import CacheKind, open_cache
from llmc.cache.source_digest import source_digest
from llmc.files.atomic_directory import AtomicDirectory
from llmc.frontends.gguf.architectures import described
from llmc.frontends.gguf.container import GgufModel, files_of, read_model
from llmc.frontends.gguf.files import LINK, SUFFIX
from llmc.frontends.gguf.metadata import Metadata
from llmc.frontends.gguf.tokenizer import NO_VOCABULARY, adds_beginning, tokenizer_of
from llmc.frontends.gguf.vocabulary import Vocabulary, read_vocabulary

# The key of the directory: everything that its contents depend on.
_ROOMS = ("frontends", "files")


def gguf_directory(file: Path) -> Path:
    """The model directory of a file, or of a split model that contains it; created if missing.

    Its name is the file's. Raises CheckpointError for a file that cannot be read, LlmcError.
    """
    files = files_of(file.absolute())
    identity = [source_digest(_ROOMS), *(_identity(part) for part in files)]
    name = sha256(json.dumps(identity).encode()).hexdigest()[:32]
    stem = file.name.removesuffix(SUFFIX)
    entry = open_cache(CacheKind.GGUF).find_or_make(
        f"{name}-{sha256(stem.encode()).hexdigest()[:8]}",
        lambda path: (path / stem / "config.json").is_file(),
        lambda path: _make(path, stem, files),
    )
    return entry / stem


def _make(entry: Path, stem: str, files: tuple[Path, ...]) -> None:
    model = read_model(files)
    with AtomicDirectory(entry, lambda broken: True) as directory:
        folder = directory.path / stem
        folder.mkdir()
        write_description(model, folder)
        for number, file in enumerate(files, start=1):
            (folder / f"{LINK}-{number:05}{SUFFIX}").symlink_to(file)
        directory.commit()


def write_description(model: GgufModel, folder: Path) -> None:
    """config.json, generation_config.json, and the tokenizer's files if the file has a vocabulary."""
    config, _ = described(model)
    kind = "tokenizer.ggml.model"
    if model.metadata.has(kind) and model.metadata.text(kind) not in NO_VOCABULARY:
        vocabulary = read_vocabulary(model.metadata, config["vocab_size"])
        tokenizer_of(vocabulary).save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", _tokenizer_config(vocabulary))
        ends = vocabulary.ends()
        _write(folder / "generation_config.json", {"eos_token_id": list(ends)} if ends else {})
    _write(folder / "config.json", config)


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    metadata = vocabulary.said
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {name: vocabulary.special(key) for name, key in named.items()}
    config["add_bos_token"] = adds_beginning(metadata)
    config["chat_template"] = chat_templates(metadata)
    return {name: value for name, value in config.items() if value is not None}


def chat_templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """The chat template, with the others that have names, as tokenizer_config.json has them; None if there is none."""
    tokenizer = metadata.of("tokenizer.")
    default = tokenizer.text("chat_template") if tokenizer.has("chat_template") else None
    listed = tokenizer.texts("chat_templates") if tokenizer.has("chat_templates") else ()
    names = [name for name in listed if tokenizer.has(f"chat_template.{name}")]
    if not names:
        return default
    templates = [] if default is None else [{"name": "default", "template": default}]
    return templates + [{"name": name, "template": tokenizer.text(f"chat_template.{name}")} for name in sorted(names)]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _identity(file: Path) -> list[Any]:
    try:
        status = file.stat()
    except OSError:
        return [str(file)]  # Reading it will say what is wrong.
    return [str(file), status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]
