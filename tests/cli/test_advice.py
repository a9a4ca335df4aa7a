"""What errors tell a user to run is a command that there is, with flags that it has; and some of it is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from llmc.cli.app import command_line
from llmc.engine_format.manifest import MANIFEST_NAME
from tests.cli.advice import PACKAGE, VALUE, VERBS, Advice, all_advice
from tests.cli.command import llmc
from tests.frontends.checkpoints import edit_json, edit_weights
from tests.quantized_checkpoints import nf4_writer, tiny_llama, write_quantized
from tests.tiny_models import tiny_checkpoint

# pip's, torchrun's and hf's, and the one that every verb has.
_OF_OTHERS = ("--force-reinstall", "--no-deps", "--master-port", "--max-restarts", "--revision", "--include", "--help")
_EXTRA = re.compile(r"llmc-compiler\[([\w,-]+)\]")


@pytest.fixture(scope="module")
def advice() -> list[Advice]:
    return all_advice()


@pytest.fixture(scope="module")
def command() -> Any:
    return typer.main.get_command(command_line())


def parse(command: Any, words: tuple[str, ...]) -> None:
    """As the command line would, without running anything. Raises click's errors, which show users' mistakes."""
    context = command.make_context("llmc", [*words])
    while isinstance(context.command, click.Group) or hasattr(context.command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, subcommand, rest = context.command.resolve_command(context, rest)
        context = subcommand.make_context(name, rest, parent=context)


def test_every_command_that_is_advised_is_one(advice: list[Advice], command: Any) -> None:
    wrong, right = [], 0
    for piece in advice:
        for words in piece.commands():
            # `llmc build` alone is a name, and no command to copy.
            if len(words) == 1 or words[1] == "--help":
                continue
            try:
                parse(command, words)
                right += 1
            except Exception as error:
                wrong.append(f"{piece.place}: llmc {shlex.join(words)}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)
    assert right > 40, "the commands are not found any more"


def test_every_flag_that_is_advised_is_one(advice: list[Advice], command: Any) -> None:
    options = [option for verb in _verbs(command) for option in verb.params]
    known = {*_OF_OTHERS, *(flag for option in options for flag in (*option.opts, *option.secondary_opts))}
    assert not {(piece.place, flag) for piece in advice for flag in piece.flags() if flag not in known}


def test_every_extra_that_is_advised_is_one(advice: list[Advice]) -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    named = {extra for piece in advice for match in _EXTRA.findall(piece.text) for extra in match.split(",")} - {VALUE}
    assert named and named <= project["optional-dependencies"].keys()


def test_prose_names_no_verb_without_backticks(advice: list[Advice]) -> None:
    """So that what looks like a command is one: it stands after a colon or in parentheses."""
    loose = [
        (piece.place, match.group())
        for piece in advice
        for match in re.finditer(r"(?<![:(`] )(?<![(`])\bllmc ([a-z-]+)", piece.text)
        if match.group(1) in VERBS and match.start() > 0 and match.end() < len(piece.text)
    ]
    assert not loose


def _verbs(command: Any) -> Iterator[Any]:
    yield command
    for subcommand in getattr(command, "commands", {}).values():
        yield from _verbs(subcommand)


# What is run, and the words of the advised command that a user fills in, and adds.
Fault = tuple[tuple[str | Path, ...], dict[str, str], tuple[str, ...]]


def _engine(tmp_path: Path) -> tuple[Path, Path]:
    model, engine = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=1), tmp_path / "engine.llmc"
    assert llmc("build", model, "--target", "reference", "-o", engine).code == 0
    return model, engine


def _other_version(tmp_path: Path) -> Fault:
    model, engine = _engine(tmp_path)
    edit_json(engine / MANIFEST_NAME, lambda manifest: manifest.update(format_version=0))
    return ("inspect", engine), {"MODEL": str(model)}, ("--target", "reference", "--force")


def _fp4(tmp_path: Path) -> Fault:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write_quantized(tmp_path / "fp4", tiny_llama(), config, nf4_writer(64, nested=False))
    edit_weights(tmp_path / "fp4", lambda tensors: {name.replace("__nf4", "__fp4"): t for name, t in tensors.items()})
    tiny_llama().save_pretrained(tmp_path / "model")
    more = ("--target", "reference", "-o", str(tmp_path / "out.llmc"))
    return ("build", tmp_path / "fp4", *more), {"MODEL": str(tmp_path / "model")}, more


def _another_dtype(tmp_path: Path) -> Fault:
    model, engine = _engine(tmp_path)
    words = {"MODEL": str(model), "ENGINE": str(tmp_path / "out.llmc")}
    return ("run", engine, "--dtype", "bfloat16", "--prompt", "x"), words, ("--target", "reference")


FAULTS = (_other_version, _fp4, _another_dtype)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_error_advises_works(fault: Callable[[Path], Fault], tmp_path: Path) -> None:
    """The command of its fix, with the user's own paths for what stands in capitals, ends well."""
    command, filled, more = fault(tmp_path)
    told = llmc(*command)
    assert told.code == 2, told
    fix = Advice("", " ".join(told.err[told.err.index("fix:") :].split()))
    *_, words = fix.commands()
    done = llmc(*(filled.get(word, word) for word in words), *more)
    assert done.code == 0, (words, done)
