"""--help, -h and --version: quick, whole, and for every verb."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer.main

import llmc as package
from llmc.cli.app import command_line
from tests.cli.command import llmc

VERBS: dict[str, Any] = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]


def verbs() -> list[tuple[str, ...]]:
    """Every verb, and those of groups as two words."""
    return [
        words
        for name, verb in VERBS.items()
        for words in ((name,), *((name, inner) for inner in getattr(verb, "commands", {})))
    ]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_fits_and_cuts_no_name(verb: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = llmc(*verb, "-h")
    assert outcome.code == 0 and llmc(*verb, "--help").out == outcome.out
    assert max(map(len, outcome.out.splitlines())) <= columns
    described: Any = VERBS[verb[0]] if len(verb) == 1 else VERBS[verb[0]].commands[verb[1]]
    words = outcome.out.split()
    for parameter in described.params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert name in words or f"{name}," in words, f"{name} is not in:\n{outcome.out}"


def test_the_command_lists_every_verb_with_its_whole_sentence() -> None:
    text = " ".join(llmc("-h").out.split())
    for name, verb in VERBS.items():
        assert f"{name} {' '.join(verb.help.partition(chr(10) * 2)[0].split())}" in text


def test_version() -> None:
    assert llmc("--version").out == f"llmc {package.__version__}\n"


def test_help_imports_neither_torch_nor_triton() -> None:
    program = (
        "import sys; sys.argv = ['llmc', '--help']\n"
        "from llmc.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
