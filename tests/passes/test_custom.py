"""Passes of users: their place in the order, and finding them by module, file and entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.errors import OptionError
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import GraphPass, RewriteLog, default, extended
from llmc.passes.custom import installed, load_passes, place
from llmc.passes.pipeline import built_in, essential


def nothing(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Changes nothing."""


def named(name: str, after: str | None = None) -> GraphPass:
    return GraphPass(name, nothing, after=after)


def test_a_pass_goes_where_it_says() -> None:
    names = [
        pass_.name
        for pass_ in extended(named("a", "fuse_rope"), named("b", "fuse_rope"), named("c", "a"), named("last"))
    ]
    start = names.index("fuse_rope")
    assert names[start : start + 4] == ["fuse_rope", "a", "c", "b"]
    assert names[-1] == "last"
    assert [n for n in names if n not in ("a", "b", "c", "last")] == [pass_.name for pass_ in default()]


@pytest.mark.parametrize(
    ("added", "says", "fix"),
    [
        (lambda: named("fuse_rope"), "there is a pass 'fuse_rope' already", "a unique name"),
        (lambda: named("mine", "fuse_ropes"), "goes after 'fuse_ropes', which does not exist", "'fuse_rope'"),
        (lambda: "fuse_rope", "a pass must be a Rewrite or a GraphPass", "docs/custom-passes.md"),
    ],
)
def test_what_does_not_fit(added: Callable[[], GraphPass], says: str, fix: str) -> None:
    with pytest.raises(OptionError, match=says) as error:
        place(built_in(), (added(),))
    assert fix in str(error.value.fix)


SOURCE = """
from llmc.passes import GraphPass
def run(graph, options, log): pass
one = GraphPass("one", run)
several = [one, GraphPass("two", run, after="fuse_rope")]
number = 3
"""


def test_passes_are_loaded_from_a_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_passes.py").write_text(SOURCE)
    assert [p.name for p in load_passes(f"{tmp_path}/my_own_passes.py:several")] == ["one", "two"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert [p.name for p in load_passes("my_own_passes:one")] == ["one"]
    with pytest.raises(OptionError, match=r"not 3 \(int\)") as error:
        load_passes("my_own_passes:number")
    assert error.value.at == "--passes-from my_own_passes:number"
    with pytest.raises(OptionError, match="my_own_passes has no 'three'") as missing:
        load_passes("my_own_passes:three")
    assert missing.value.fix == "passes in it: one"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no_colon", "does not name passes"),
        ("module:", "does not name passes"),
        ("no_such_module_at_all:x", "ModuleNotFoundError"),
        ("none.py:x", "there is no file none.py"),
        ("broken.py:x", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded(reference: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(OptionError, match=says) as error:
        load_passes(reference)
    assert error.value.fix is not None and reference in str(error.value.at)


def test_an_installed_package_adds_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves behind: a module, and metadata with an entry point."""
    (tmp_path / "plugin_of_a_test.py").write_text(SOURCE)
    metadata = tmp_path / "plugin_of_a_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-a-test\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[llmc.passes]\nmine = plugin_of_a_test:several\n")
    assert installed() == ()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [p.name for p in installed()] == ["one", "two"]
    names = [p.name for p in default()]
    assert names[names.index("fuse_rope") + 1] == "two" and names[-1] == "one"
    (metadata / "entry_points.txt").write_text("[llmc.passes]\nmine = plugin_of_a_test:number\n")
    with pytest.raises(OptionError) as error:
        default()
    assert error.value.at == "entry point mine = plugin_of_a_test:number"


def test_essential_passes_are_llmcs_own() -> None:
    assert essential() < {pass_.name for pass_ in built_in()}
    assert "page_kv_cache" in essential() and "merge_qkv" not in essential()
