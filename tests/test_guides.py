"""Every `llmc …` command of the guides runs as it stands, on a shipped model, unless ELSEWHERE says why it does not.

The names that guides use stand for files in the working directory: MODEL is a model directory, ENGINE and out.llmc are
engines, TEXT is a text. The commands of a page run in its order. They are alternatives where several write the same
output, so the output of an earlier one is removed.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from transformers import AutoModelForCausalLM

from tests.documentation import PAGES, commands
from tests.gguf_files import add_tokenizer, write_gguf
from tests.test_documentation import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"
BARD = EXAMPLES / "models" / "bard-6m"
T = TypeVar("T")
LLMC = (sys.executable, "-m", "llmc")
# What does not run here, by page and the beginning of the command: why, or which test runs it.
ELSEWHERE = {
    ("README.md", "build examples/models/bard-6m -o out.llmc --target cpu-avx512"): "shows an error",
    ("README.md", "chat"): "downloads a model",
    ("adapters.md", "build MODEL --lora"): "a reader's adapters: tests/adapters/",
    ("adapters.md", "build examples/models/bard-6m --lora"): "a reader's adapters: tests/adapters/",
    ("adapters.md", "serve"): "a reader's adapters: tests/adapters/",
    ("adapters.md", "run"): "a reader's adapters: tests/adapters/",
    ("coming-from.md", "serve"): "tests/test_documentation.py",
    ("coming-from.md", "build"): "tests/test_documentation.py",
    ("coming-from.md", "run"): "tests/test_documentation.py",
    ("coming-from.md", "bench"): "tests/test_documentation.py",
    ("conversations.md", "serve"): "a reader's template: tests/runtime/text/",
    ("custom-passes.md", "build"): "tests/test_custom_passes_page.py",
    ("debugging.md", "bisect MODEL"): "searches for an error, and the model has none",
    ("embeddings.md", "build"): "downloads a model",
    ("embeddings.md", "serve"): "downloads a model",
    ("experts.md", "build MODEL --target h100"): "compiles for a GPU, which takes minutes: tests/codegen/triton/",
    ("generating.md", "cache clear"): "clears the cache of the tests",
    ("gguf.md", "serve"): "downloads a model",
    ("gpu.md", ""): "compiles for a GPU, which takes minutes, or needs one: tests/codegen/triton/, tests/tuning/",
    ("kv-offloading.md", "serve ENGINE --kv-offloading-size 20GB --kv-offloading-dir"): "writes to /var/lib",
    ("latent-attention.md", "build MODEL --disable-pass"): "a model without latent attention has no such pass to skip",
    ("models.md", "models"): "a placeholder: tests/test_architectures.py",
    ("parallel.md", "build MODEL --target h100"): "compiles for a GPU, which takes minutes: tests/codegen/triton/",
    ("simulation.md", "simulate MODEL --target a100"): "a reader's trace: tests/simulation/",
    ("simulation.md", "simulate examples/configs/llama-3-70b"): "simulates a 70B model for minutes: tests/simulation/",
    ("onnx.md", "bisect"): "searches for an error, and the model has none",
    ("ptx.md", ""): "an engine for a GPU, which takes minutes to build: tests/end_to_end/test_ptx_engines.py",
    ("real-model.md", ""): "downloads a model",
    ("serving.md", "serve out.llmc --data-parallel-size"): "four engines at once: tests/runtime/server/",
    ("serving.md", "bench serve"): "needs a server under load: tests/bench/",
    ("sparsity.md", "build SPARSE_MODEL"): "a reader's checkpoint: tests/passes/sparsity/",
    ("speculation.md", "train-medusa"): "trains for minutes: tests/training/",
    ("speculation.md", "build examples/models/bard-6m --speculative heads"): "needs the trained heads: tests/training/",
    ("speculation.md", "run bard-medusa.llmc"): "needs the trained heads: tests/training/",
    ("states.md", "build"): "downloads a model",
}
# The commands that find an error, by page and beginning, with their exit codes.
EXIT_CODES = {
    ("debugging.md", "diff examples/models/bard-6m"): 1,
    ("debugging.md", "prove --passes-from"): 1,
}


def _elsewhere(page: str, command: str) -> str | None:
    return _listed(ELSEWHERE, page, command)


def _listed(table: Mapping[tuple[str, str], T], page: str, command: str) -> T | None:
    """The value of the first row that is about this command."""
    return next((value for (name, begins), value in table.items() if name == page and command.startswith(begins)), None)


def _guides() -> list[Path]:
    """The pages with a command that runs here."""
    return [page for page in PAGES if any(not _elsewhere(page.name, shlex.join(words)) for words in commands(page))]


@pytest.mark.parametrize(("page", "begins"), [*ELSEWHERE, *EXIT_CODES])
def test_a_command_that_does_not_run_is_in_its_guide(page: str, begins: str) -> None:
    path = next(path for path in PAGES if path.name == page)
    assert any(shlex.join(words).startswith(begins) for words in commands(path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", _guides(), ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    _prepare(tmp_path)
    for words in commands(page):
        command = shlex.join(words)
        if _elsewhere(page.name, command) is None:
            _run(words, tmp_path, _listed(EXIT_CODES, page.name, command) or 0)


def _prepare(place: Path) -> None:
    """Write the files that the guides name and no command of theirs makes."""
    (place / "examples").symlink_to(EXAMPLES)
    (place / "MODEL").symlink_to(BARD)
    (place / "TEXT").symlink_to(EXAMPLES / "data" / "heldout.txt")
    (place / "schema.json").write_text('{"type": "boolean"}')


def _run(words: list[str], place: Path, exit_code: int) -> None:
    outputs = [value for option, value in pairwise(words) if option == "-o"]
    for name, make in MADE.items():
        if name not in outputs and name in shlex.join(words) and not (place / name).exists():
            make(place)
    if "--force" not in words:
        for output in outputs:
            shutil.rmtree(place / output, ignore_errors=True)
    if words[0] == "serve":
        _serve(words, place)
    else:
        _llmc(words, place, exit_code)


def _llmc(words: list[str], place: Path, exit_code: int = 0) -> None:
    done = subprocess.run([*LLMC, *words], cwd=place, input="/exit\n", capture_output=True, text=True)
    assert done.returncode == exit_code, f"llmc {shlex.join(words)}\n{done.stdout}{done.stderr}"


def _serve(words: list[str], place: Path) -> None:
    """Start the server, on a free port, and stop it when it is ready."""
    port = free_port()
    with subprocess.Popen([*LLMC, *words, "--port", str(port)], cwd=place) as server:
        try:
            while True:
                assert server.poll() is None, f"llmc {shlex.join(words)} has ended"
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def _engine(name: str) -> Callable[[Path], None]:
    return lambda place: _llmc(["build", str(BARD), "-o", name], place)


def _draft(place: Path) -> None:
    _llmc(["build", "examples/models/bard-draft", "-o", "bard-draft.llmc"], place)


def _gguf(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(BARD)
    write_gguf(place / "model-Q4_0.gguf", model, "Q4_0", add=lambda writer: add_tokenizer(writer, BARD, "gpt-2"))


def _onnx(place: Path) -> None:
    """With its weights and tokenizer next to it."""
    _llmc(["export", "MODEL", "--stage", "canonical", "-o", "exported"], place)
    for file in (place / "exported").iterdir():
        shutil.copy(file, place)


MADE: dict[str, Callable[[Path], None]] = {
    **{name: _engine(name) for name in ("ENGINE", "out.llmc", "bard.llmc")},
    "bard-draft.llmc": _draft,
    "model-Q4_0.gguf": _gguf,
    "model.onnx": _onnx,
}
