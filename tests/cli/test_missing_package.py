"""Verbs where packages are missing: what works without them, and what names the extra. In full: make test-extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmc.cli.missing_package import missing_package
from tests.cli.command import MODEL

# As if they were not installed: Python raises ModuleNotFoundError for a module that is None.
PROGRAM = """
import sys
blocked, *words = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
sys.argv = ["llmc", *words]
from llmc.cli.app import main
main()
"""


slow = pytest.mark.slow


def without(blocked: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, blocked, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ("targets",),
        ("inspect", "ENGINE"),
        pytest.param(("profile", "ENGINE", "--prefill", "8", "--repeats", "1"), marks=slow),
        ("viz", "ENGINE", "--format", "json"),
        ("explain", "ENGINE", "--pass", "fuse_rms_norm", "--strict"),
    ],
)
def test_verbs_that_do_without_torch(words: tuple[str, ...], draft_engine: Path) -> None:
    done = without("torch,transformers,triton", *(draft_engine if word == "ENGINE" else word for word in words))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_report_is_written_without_torch(draft_engine: Path, tmp_path: Path) -> None:
    done = without("torch", "report", draft_engine, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("blocked", "words", "named"),
    [
        ("torch", ("passes",), "pip install torch"),
        pytest.param(
            "transformers", ("verify", "ENGINE", "--against", MODEL), "llmc-compiler[hf]", marks=pytest.mark.slow
        ),
        ("aiohttp", ("bench", "serve"), "llmc-compiler[serve]"),
        ("llguidance", ("run", "ENGINE", "-p", "hi", "--grammar", "json"), "llmc-compiler[serve]"),
    ],
)
def test_what_is_missing_is_named(blocked: str, words: tuple[str | Path, ...], named: str, draft_engine: Path) -> None:
    done = without(blocked, *(draft_engine if word == "ENGINE" else word for word in words))
    assert done.returncode == 2 and named in done.stderr, done
    assert "Traceback" not in done.stderr


def test_latency_needs_no_extra(draft_engine: Path) -> None:
    few = ("--input-len", "4", "--output-len", "2", "--iterations", "1", "--warmup", "0")
    done = without("torch,aiohttp,fastapi", "bench", "latency", draft_engine, *few)
    assert done.returncode == 0, done.stderr


def test_a_module_of_our_own_is_no_missing_package() -> None:
    assert missing_package(ModuleNotFoundError(name="llmc.nothing")) is None
