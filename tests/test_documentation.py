"""What README and docs/ show is true: commands parse, Python and shell run as they stand, links lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import typer.main

from llmc.cli.app import command_line
from tests.documentation import PAGES, ROOT, blocks, commands

PORTS = re.compile(r"\b80[08]0\b")
RUN_PYTHON = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
result = eval(code, {"__name__": "__main__"})
if inspect.iscoroutine(result):
    asyncio.run(result)
"""
# Pages whose Python asks a server, which the page says how to start.
SERVED_PAGES = ("serving.md",)
# Options of benchmarks/, which the pages name as they do those of llmc.
BENCHMARK_OPTIONS = {
    *("--gguf-type", "--from-gguf", "--llama-cpp-python", "--schemes", "--promised", "--rows"),
    *("--medusa-tokens", "--sentence-transformers-python", "--windows", "--decode-only"),
}
# Its blocks are given a model, in tests/test_custom_passes_page.py.
TESTED_ELSEWHERE = ("custom-passes.md",)
# Their Python takes adapters and models that only a reader has; tests/adapters/ and tests/heads/ make these calls.
PAGES_OF_OTHER_MODELS = ("adapters.md", "embeddings.md", "real-model.md")


@pytest.fixture(scope="module")
def top() -> Any:
    """The command with all its verbs, made once."""
    return typer.main.get_command(command_line())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path, top: Any) -> None:
    for words in commands(page):
        command, rest = top, list(words)
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"llmc has no verb {rest[0]!r}"
            command = command.commands[rest.pop(0)]
        context = command.context_class(command, info_name=" ".join(words), resilient_parsing=False)
        command.make_parser(context).parse_args(rest)  # Raises for an option that does not exist.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_exist(page: Path, top: Any) -> None:
    assert set(re.findall(r"`llmc ([a-z]+(?:-[a-z]+)*)", page.read_text(encoding="utf-8"))) <= set(top.commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path, top: Any) -> None:
    """Those that the text names; other programs have theirs in the left column of a table, or after their name."""
    text = re.sub(r"^\|[^|]*\|", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = (code for code in re.findall(r"`([^`\n]+)`", text) if "benchmarks." not in code)
    options = {option for code in named for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+(?![\w*])", code)}
    assert options - BENCHMARK_OPTIONS <= _options(top) | {"--help"}


def _options(command: Any) -> set[str]:
    """Of a verb, or of all verbs of a group."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(_options(verb) for verb in getattr(command, "commands", {}).values()))


def test_errors_are_quoted_as_they_are() -> None:
    """Users look for what their terminal says."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'"([^"]+)"', " ".join(re.findall(r"^\*\*.*?\*\*", page, re.MULTILINE)))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llmc").rglob("*.py"))
    parts = [part.strip() for message in quoted for part in message.split("…") if part.strip()]
    assert len(parts) > 5 and [part for part in parts if part not in sources] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text(encoding="utf-8")):
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_the_pages_are_in_the_sites_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f" {page.name}\n" not in site] == []


def _pages_with(language: str) -> list[Any]:
    """The README's commands in the quick suite; what else there is builds more engines."""
    left_out = (*TESTED_ELSEWHERE, *PAGES_OF_OTHER_MODELS) if language == "python" else TESTED_ELSEWHERE
    pages = [page for page in PAGES if blocks(page, language) and page.name not in left_out]
    marks = [() if page.name == "README.md" and language != "python" else pytest.mark.slow for page in pages]
    return [pytest.param(page, id=page.name, marks=mark) for page, mark in zip(pages, marks, strict=True)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the pages have it: examples/, and the engine that they call out.llmc."""
    directory = tmp_path_factory.mktemp("page")
    (directory / "examples").symlink_to(ROOT / "examples")
    return directory


@pytest.mark.parametrize("page", _pages_with("python"))
def test_python_runs(page: Path, place: Path) -> None:
    text = "\n".join(blocks(page, "python"))
    if "out.llmc" in text or page.name in SERVED_PAGES:
        _build(place / "out.llmc")
    port = free_port()
    text = PORTS.sub(str(port), text)
    if page.name not in SERVED_PAGES:
        _run([sys.executable, "-c", RUN_PYTHON], place, text)
        return
    with _Server(place, port):
        _run([sys.executable, "-c", RUN_PYTHON], place, text)


@pytest.mark.parametrize("page", _pages_with("bash"))
def test_shell_runs(page: Path, place: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    _build(place / "out.llmc")
    port = free_port()
    script = "set -e\n" + PORTS.sub(str(port), "\n".join(blocks(page, "bash")))
    if page.name not in SERVED_PAGES:
        _run(["bash"], place, script)
        return
    with _Server(place, port):
        _run(["bash"], place, script.replace("curl ", "curl --fail-with-body "))


class _Server:
    """`llmc serve out.llmc`, for as long as a page runs."""

    def __init__(self, place: Path, port: int) -> None:
        command = [sys.executable, "-m", "llmc", "serve", "out.llmc", "--port", str(port), "--chat-template", "plain"]
        self._process = subprocess.Popen([*command, "--served-model-name", "bard-6m"], cwd=place)
        wait = ["curl", "--silent", "--retry", "60", "--retry-delay", "1", "--retry-connrefused"]
        subprocess.run([*wait, f"http://127.0.0.1:{port}/health"], check=True)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def _build(engine: Path) -> None:
    if not engine.exists():
        command = [sys.executable, "-m", "llmc", "build", "examples/models/bard-6m", "-o", engine.name]
        subprocess.run(command, cwd=engine.parent, check=True, capture_output=True)


def _run(command: list[str], place: Path, text: str) -> None:
    """Run a page's text in a process group of its own, which ends with it: what it started in the background, too."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # A file, not a pipe: who was started in the background would hold a pipe open.
    with tempfile.TemporaryFile() as shown:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.communicate(text.encode())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        shown.seek(0)
        assert process.returncode == 0, shown.read().decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
