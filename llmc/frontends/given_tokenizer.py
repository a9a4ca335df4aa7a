"""A tokenizer given with the model: an object of transformers or tokenizers, or a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from llmc.errors import OptionError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.tokenizer_files import GENERATION, TOKENIZER, tokenizer_files
from llmc.frontends.captured import Captured, check_tokenizer
from llmc.frontends.end_token import with_end_token


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
    """The capture with this tokenizer instead of the model's, if there is one, and its end token in addition to the
    model's."""
    if files is not None:
        own = tuple(file for file in captured.tokenizer_files if file.name == GENERATION)
        captured = replace(captured, tokenizer_files=(*files, *own))
    return with_end_token(captured)


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
