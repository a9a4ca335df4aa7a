"""A tokenizer that comes beside the model: an object of transformers or tokenizers, or a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from llmc.errors import OptionError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.tokenizer_files import GENERATION, SETTINGS, TOKENIZER, tokenizer_files
from llmc.frontends.captured import Captured, check_tokenizer
from llmc.frontends.checkpoints.directory_files import read_json


@contextmanager
def given_tokenizer(tokenizer: object | None) -> Iterator[tuple[Path, ...] | None]:
    """The files of a tokenizer, which exist within the context; None for none.

    tokenizer: a fast tokenizer of transformers (with its chat template), a tokenizers.Tokenizer, or a directory that
    holds tokenizer.json. Raises OptionError for anything else.
    """
    if tokenizer is None:
        yield None
        return
    if isinstance(tokenizer, str | PathLike):
        yield _files(Path(tokenizer), f"tokenizer={str(tokenizer)!r}")
        return
    with ScratchDirectory() as folder:
        _save(tokenizer, folder)
        yield _files(folder, f"tokenizer={type(tokenizer).__name__}")


def with_tokenizer(captured: Captured, files: tuple[Path, ...] | None) -> Captured:
    """The capture with this tokenizer in place of its own, and its end token where the model names none."""
    if files is None:
        return captured
    own = tuple(file for file in captured.tokenizer_files if file.name == GENERATION)
    info, notes = captured.graph.info, captured.notes
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(next(file for file in files if file.name == TOKENIZER)))
    size = known.get_vocab_size()
    if size > info.vocab_size:
        notes += (f"the tokenizer has {size} tokens, the model {info.vocab_size}: it may not belong to it",)
    end = _end_token(files)
    end_id = None if end is None else known.token_to_id(end)
    if not info.eos_token_ids and end_id is not None and end_id < info.vocab_size:
        captured.graph.info = replace(info, eos_token_ids=(end_id,))
    return replace(captured, notes=notes, tokenizer_files=(*files, *own))


def _save(tokenizer: Any, folder: Path) -> None:
    from tokenizers import Tokenizer

    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(str(folder / TOKENIZER))
    elif getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    else:
        raise OptionError(
            f"tokenizer cannot be {tokenizer!r:.60} ({type(tokenizer).__name__})",
            at="tokenizer",
            fix="give a fast tokenizer of transformers, a tokenizers.Tokenizer, or a directory with tokenizer.json",
        )


def _files(folder: Path, at: str) -> tuple[Path, ...]:
    if not (folder / TOKENIZER).is_file():
        raise OptionError(
            f"there is no {TOKENIZER}",
            at=f"{at}: {folder}",
            fix="name the directory that holds it; a fast tokenizer's save_pretrained writes one",
        )
    check_tokenizer(folder)
    return tuple(file for file in tokenizer_files(folder) if file.name != GENERATION)


def _end_token(files: tuple[Path, ...]) -> str | None:
    """What tokenizer_config.json calls the end of a text."""
    file = next((file for file in files if file.name == SETTINGS), None)
    if file is None:
        return None
    end = read_json(file).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None
