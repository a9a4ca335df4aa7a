"""Virtual environments that tests install packages into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def environment(folder: Path) -> Path:
    """A new virtual environment's Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str) -> str:
    """The output of pip."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
