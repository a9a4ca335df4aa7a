"""Pages of the site that are generated: from the README, from docstrings, and from the commands themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import llmc
from llmc.cli.app import command_line

ROOT = Path(__file__).parent.parent
# Page → its file in the root.
FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
}
# Argument and result types of the public names.
ALSO = (
    "llmc.options.BuildOptions",
    "llmc.runtime.requests.completion.Completion",
    "llmc.runtime.requests.completion.Choice",
    "llmc.runtime.requests.completion.Piece",
    "llmc.report.build_report.BuildReport",
    "llmc.errors",
)
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of docs/: adds the generated pages."""
    for page, name in FROM_ROOT.items():
        text = from_root((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/python.md", content=python_reference()))
    files.append(File.generated(config, "reference/command-line.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs with each page: a link to a file outside of docs/ becomes the file's name."""
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


def from_root(text: str) -> str:
    """A file of the root as a page of the site: its links lead to the site's pages, or become text."""
    pages = {name: page for page, name in FROM_ROOT.items()}

    def linked(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        if path.startswith("docs/"):
            return f"]({path.removeprefix('docs/')}{mark}{anchor})"
        return f"]({pages[path]}{mark}{anchor})" if path in pages else f"](../{path})"

    return _LINK.sub(linked, text)


def python_reference() -> str:
    """Everything in `llmc.__all__`, from its docstrings."""
    parts = ["# Python\n\nThe public names of `import llmc`, with their types.\n"]
    for name in sorted(set(llmc.__all__) - {"passes"}, key=str.lower):
        public = getattr(llmc, name)
        parts.append(_section(name, f"{public.__module__}.{public.__qualname__}"))
    parts.append(_section("passes", "llmc.passes"))
    parts += [_section(path.removeprefix("llmc."), path) for path in ALSO]
    return "\n".join(parts)


def _section(name: str, path: str) -> str:
    return f"## llmc.{name}\n\n::: {path}\n    options:\n      show_root_heading: false\n"


def command_reference() -> str:
    """Each verb with its arguments and options, from the commands themselves."""
    app = command_line()
    command: Any = typer.main.get_command(app)
    _say_whole(command)
    context = typer.Context(command, info_name="llmc")
    text = get_docs_for_click(obj=command, ctx=context, name="llmc", title="Command line")
    return re.sub(r"\[(?:/|/?(?:bold|dim|red|green)[^]]*)\]", "", text)


def _say_whole(command: Any) -> None:
    """Use every verb's first sentence as its line in the list, which typer otherwise cuts after 45 letters."""
    for subcommand in getattr(command, "commands", {}).values():
        subcommand.short_help = (subcommand.help or "").partition(". ")[0].partition("\n\n")[0].rstrip(".") + "."
        _say_whole(subcommand)
