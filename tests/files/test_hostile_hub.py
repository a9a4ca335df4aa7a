"""Hubs whose answers would lead out of the cache, or that are not of a hub's form: an error, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmc.files.hub_model import HubName, hub_name
from tests.files.hub_faults import ESCAPED, MALFORMED, OUTSIDE, ROOT
from tests.hub_server import HOSTILE, hub_with

FAULTS = {**OUTSIDE, **MALFORMED}
ASK = """
import json, sys
from llmc.errors import LlmcError
from llmc.frontends.open_model import local_model
for name in json.loads(sys.argv[1]):
    try:
        print(json.dumps([name, local_model(name).as_posix(), "", ""]), flush=True)
    except LlmcError as error:
        print(json.dumps([name, None, error.problem, error.fix]), flush=True)
"""


def tree(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


@dataclass(frozen=True)
class Outcome:
    """directory: of the model; None where it is refused. beside: all that now stands outside the cache, and did not."""

    directory: Path | None
    problem: str
    fix: str
    beside: frozenset[str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of the right model and of each fault, all asked for in one process, which shares a cache."""
    root = tmp_path_factory.mktemp("root")
    files, home = root / "files", root / "a" / "b" / "c" / "d" / "e" / "home"
    files.mkdir()
    home.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (files / name).write_text(json.dumps({"name": name}))
    before = tree(root)
    with hub_with("org/right", files, {name: fault for name, (fault, _) in FAULTS.items()}) as hub:
        names = ["org/right", *(f"{HOSTILE}/{name}" for name in FAULTS)]
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(names)],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    beside = frozenset(path for path in tree(root) - before if not path.startswith("a/b/c/d/e/home/"))
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name.rpartition("/")[2]: Outcome(Path(directory) if directory else None, problem, fix, beside)
        for name, directory, problem, fix in told
    }


def test_nothing_is_written_outside_the_cache(outcomes: dict[str, Outcome]) -> None:
    right = outcomes["right"]
    assert right.directory is not None and right.beside == frozenset()
    home = right.directory.parents[3]
    assert not [path for path in home.rglob("*") if ESCAPED in path.name]
    assert {path.name for path in home.iterdir()} <= {"hub", "xet"}
    assert all(
        path.name.startswith(("models--", ".locks", "CACHEDIR.TAG", "blobs")) for path in (home / "hub").iterdir()
    )
    assert not [path for path in (Path(ROOT), Path(f"{ROOT}.json")) if path.exists()]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_of_another_form_is_refused_in_words(fault: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[fault]
    assert outcome.directory is None
    assert FAULTS[fault][1] in outcome.problem and outcome.fix
    assert len(outcome.problem) < 400 and outcome.problem.isprintable()


def test_a_revision_stays_below_the_model(tmp_path: Path) -> None:
    for revision in ("..", "../../x", "a/../../x", "/x", "a/.git"):
        assert hub_name(f"org/tiny@{revision}") is None
    assert hub_name("org/tiny@refs/pr/1") == HubName("org/tiny", "refs/pr/1")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Of a file that the disk has no room for, before it is fetched; of one that no longer fits, when it is written."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text("{}")
    (files / "model.safetensors").write_bytes(bytes(1 << 20))
    script = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n{ASK}"
    with hub_with("org/right", files) as hub:
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps(["org/right"])],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
    _, directory, problem, fix = json.loads(done.stdout)
    assert directory is None
    assert problem.startswith("there is no room for what is fetched of org/right (File too large)")
    assert "HF_HOME" in fix
