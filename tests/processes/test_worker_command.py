"""Worker processes: what they import is llmc's and the installed packages', and others' programs see no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.processes.worker_command import minimal_environment, worker_command, worker_environment

PRINT_PATH = "import json, sys\nif __name__ == '__main__':\n    print(json.dumps(sys.path))\n"
ROOT = str(Path(__file__).parent.parent.parent)


def test_the_current_directory_is_not_imported_from(tmp_path: Path) -> None:
    """Whatever PYTHONPATH says of it; but the trees that a developer names there are."""
    hostile, mine = tmp_path / "hostile", tmp_path / "mine"
    for folder in (hostile, mine):
        folder.mkdir()
        (folder / "print_path.py").write_text(PRINT_PATH)
    (mine / "own_tree.py").touch()
    (hostile / "jinja2.py").write_text("raise SystemExit('the current directory was imported from')")
    for given in (f"{mine}", f"{os.pathsep}{mine}", f".{os.pathsep}{mine}{os.pathsep}"):
        environ = {**os.environ, "PYTHONPATH": given}
        for environment in (worker_environment(environ), minimal_environment(environ)):
            command = worker_command("print_path")
            done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=True)
            assert str(mine) in json.loads(done.stdout) and str(hostile) not in json.loads(done.stdout)


def test_a_source_tree_that_is_not_installed_is_found(tmp_path: Path) -> None:
    """As when llmc was found through the current directory."""
    for environment in (worker_environment({}), minimal_environment({})):
        code = "import llmc, sys; print(llmc.__path__[0])"
        command = [sys.executable, "-P", "-S", "-c", code]  # -S: without site-packages.
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()) == Path(ROOT, "llmc")


@pytest.mark.parametrize("name", ["LLMC_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"])
def test_secrets_stay_here(name: str) -> None:
    environ = {name: "secret", "LC_ALL": "C.UTF-8", "PATH": "/bin"}
    kept = minimal_environment(environ)
    assert "secret" not in kept.values() and kept["PATH"] == "/bin" and kept["LC_ALL"] == "C.UTF-8"
    assert worker_environment(environ)[name] == "secret"
