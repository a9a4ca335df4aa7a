"""Each verb on a real engine: what a user sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.targets import host_target
from tests.cli.command import MODEL, Outcome, llmc


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("verbs") / "draft.llmc"
    return path, llmc("build", MODEL, "-o", path)


def test_build_ends_with_its_tables(build: tuple[Path, Outcome]) -> None:
    path, outcome = build
    assert outcome.code == 0, outcome.err
    for part in ("fuse_rms_norm", "llmc_paged_attention", "arena", "unshared", "decode step, predicted", "total"):
        assert part in outcome.out
    for stage in ("capture", "passes", "compile", "weights", "finish"):
        assert stage in outcome.err
    assert json.loads((path / "report" / "passes.json").read_text())[0]["name"] == "remove_export_residue"
    assert (path / "kernels" / "engine.cpp").read_text().startswith("//")
    assert (path / "report" / "graphs" / "00-captured.txt").exists()


def test_run_prints_prompt_and_text(build: tuple[Path, Outcome]) -> None:
    outcome = llmc("run", build[0], "--prompt", "The king", "--max-tokens", "12")
    assert outcome.code == 0
    assert outcome.out.startswith("The king")
    assert "12 tokens" in outcome.err
    again = llmc("run", build[0], "--prompt", "The king", "--max-tokens", "12")
    assert again.out == outcome.out


def test_run_takes_several_prompts(build: tuple[Path, Outcome]) -> None:
    alone = llmc("run", build[0], "--prompt", "The king", "--max-tokens", "8").out.strip()
    both = llmc("run", build[0], "--prompt", "The king", "--prompt", "A", "--max-tokens", "8")
    assert both.out.startswith(alone)
    assert "16 tokens" in both.err


def test_verify_compares_with_the_model(build: tuple[Path, Outcome]) -> None:
    outcome = llmc("verify", build[0], "--against", MODEL, "--length", "32", "--sequences", "2")
    assert outcome.code == 0
    assert "top-1 agreement" in outcome.out
    strict = llmc("verify", build[0], "--against", MODEL, "--length", "32", "--tolerance", "1e-9")
    assert strict.code == 2
    assert "; 1e-09 is allowed" in strict.err


def test_inspect_shows_kernels_launches_and_weights(build: tuple[Path, Outcome]) -> None:
    outcome = llmc("inspect", build[0], "--launches", "--weights")
    assert outcome.code == 0
    for part in ("llmc_lm_head_bf16", "kv cache", "modeling_llama", "panels", host_target().name):
        assert part.lower() in outcome.out.lower()


def test_passes_lists_and_runs_the_pipeline() -> None:
    assert "page_kv_cache" in llmc("passes").out
    rewrites = llmc("passes", MODEL, "--rewrites", "--refusals").out
    assert "merge_qkv" in rewrites and "#1 " in rewrites
    assert "llmc.paged_attention" in llmc("passes", MODEL, "--graph").out
    captured = llmc("passes", MODEL, "--stop-after", "0", "--graph").out
    assert "aten." in captured
    assert "llmc.rms_norm" not in captured


def test_targets_and_env() -> None:
    assert host_target().name in llmc("targets").out
    assert "GB/s" in llmc("env").out


@pytest.mark.parametrize(
    ("arguments", "code"), [(["targets"], 0), pytest.param(["inspect", "nowhere"], 2, marks=pytest.mark.slow)]
)
def test_the_process_ends_with_its_output_written_and_its_exit_code(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-m", "llmc", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert (host_target().name in done.stdout) if code == 0 else ("no such engine" in done.stderr)
