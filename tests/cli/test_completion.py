"""Shell completion: what bash offers after a line, and the scripts of the other shells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.cli.completion import complete_schemes, complete_targets
from llmc.formats.schemes import SCHEMES
from llmc.targets import known_targets
from tests.quick_sample import quick_sample


@pytest.fixture(scope="module")
def llmc_on_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a command `llmc`, which notes the modules that it imported, and bash's completion of it."""
    folder = tmp_path_factory.mktemp("bin")
    program = (
        f"#!{sys.executable}\n"
        "import atexit, os, sys\n"
        "from pathlib import Path\n"
        "from llmc.cli.app import run_process\n"
        f"note = Path({str(folder / 'imported')!r})\n"
        "atexit.register(lambda: note.write_text('\\n'.join(sys.modules)))\n"
        "run_process()\n"
    )
    (folder / "llmc").write_text(program)
    (folder / "llmc").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLMC_")}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**environment, "COMPLETION": script_for("bash", environment)}


def script_for(shell: str, environment: dict[str, str]) -> str:
    """What the user's shell reads when it starts."""
    asked = {**environment, "_LLMC_COMPLETE": f"source_{shell}"}
    return subprocess.run(["llmc"], capture_output=True, text=True, check=True, env=asked).stdout


def completed(line: str, environment: dict[str, str]) -> list[str]:
    """What bash offers for the last word of a line: by the script that llmc prints, as the shell itself calls it."""
    words = line.split(" ")
    script = (
        f"{environment['COMPLETION']}\n"
        f"COMP_WORDS=({' '.join(shlex.quote(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        "_llmc_completion llmc\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    assert done.stderr == ""
    return done.stdout.split()


COMPLETED = [
    ("llmc bu", {"build"}),
    ("llmc bench th", {"throughput"}),
    ("llmc run --max-t", {"--max-tokens"}),
    ("llmc build model --target h", {"h100", "h200"}),
    ("llmc build model --target a100,h1", {"a100,h100"}),
    ("llmc build model --quantize lm_head=nf", {"lm_head=nf4"}),
    ("llmc serve model --target rtx", {"rtx4090"}),
]


@pytest.mark.parametrize(("line", "offered"), quick_sample(COMPLETED, COMPLETED[4:6]))
def test_bash_completes(line: str, offered: set[str], llmc_on_path: dict[str, str]) -> None:
    assert set(completed(line, llmc_on_path)) == offered
    imported = set((Path(llmc_on_path["PATH"].split(":")[0]) / "imported").read_text().split())
    assert not imported & {"torch", "triton", "transformers", "numpy"}, "completion has to be quick"


def test_every_target_and_scheme_is_offered() -> None:
    assert {target.name for target in known_targets()} <= {name for name, _ in complete_targets("")}
    assert set(SCHEMES) <= set(complete_schemes("")) and complete_schemes("int8,nf") == ["int8,nf4"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_theirs(shell: str, llmc_on_path: dict[str, str]) -> None:
    assert f"complete_{shell}" in script_for(shell, llmc_on_path)
