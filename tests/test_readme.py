"""The README's Python runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_python_blocks_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "4096)" in done.stdout


def test_the_verbs_that_it_names_exist() -> None:
    from llmc.cli.app import command_line

    app = command_line()
    named = set(re.findall(r"`llmc ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    groups = {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance is not None}
    assert named <= {command.name for command in app.registered_commands} | groups
