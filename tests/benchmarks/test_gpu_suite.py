"""The GPU suite's control flow, which needs no GPU: plan, limits, failures, ratios and the record."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu.measurement import Measurement, parse, report
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.workloads import Decode, Prefill, decode_bytes, matrix_elements, prefill_flops
from benchmarks.gpu_suite import (
    NEEDED,
    ROOT,
    SHAPES,
    Job,
    is_installed,
    jobs,
    main,
    ranks_not_measured,
    run_jobs,
    selected,
    tables,
    write_results,
)
from benchmarks.random_checkpoint import SHAPES as CONFIGS
from benchmarks.random_checkpoint import layer_tensors, outer_tensors

MEASURE = "from benchmarks.gpu.measurement import *; report(Measurement('g', 'c', 'llmc', (1.0, 2.0), bytes=8.0))"


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def hangs_after(measurement: Measurement) -> tuple[str, ...]:
    """A process that reports before any limit: not one of Python, which has to start first."""
    with redirect_stdout(io.StringIO()) as printed:
        report(measurement)
    return ("sh", "-c", f"echo {shlex.quote(printed.getvalue().strip())}; exec sleep 600")


def run(*planned: Job, budget: float = 60.0) -> dict[str, Outcome]:
    return {o.job: o for o in run_jobs(planned, budget, Console(file=io.StringIO()))}


def test_the_dry_run_lists_every_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--dry-run"])
    monkeypatch.setenv("COLUMNS", "240")
    main()
    printed = capsys.readouterr().out
    for job in jobs(Path("d"), SHAPES):
        assert job.name in printed


def test_several_gpus_are_measured_where_there_are_as_many() -> None:
    """And what is lacking is said."""
    names = [[job.name for job in jobs(Path("d"), SHAPES, gpus) if "GPUs" in job.name] for gpus in (1, 4, 8)]
    assert names == [
        [],
        [f"llmc {SHAPES[0]} on {n} GPUs" for n in (2, 4)],
        [f"llmc {SHAPES[0]} on {n} GPUs" for n in (2, 4, 8)],
    ]
    assert "engines on 2, 4, 8 GPUs, of which this machine has 1" in (ranks_not_measured(1) or "")
    assert ranks_not_measured(8) is None


def gpu_test_modules() -> list[Path]:
    """With tests marked so, or with the kernels' fixture `device`; relative to the repository."""
    is_for_a_gpu = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu|^def test_\w+\(\s*device: str", re.MULTILINE)
    paths = (ROOT / "tests").rglob("test_*.py")
    return sorted(path.relative_to(ROOT) for path in paths if is_for_a_gpu.search(path.read_text(encoding="utf-8")))


def test_every_test_for_a_gpu_is_run() -> None:
    (tests,) = (job.arguments for job in jobs(Path("d"), SHAPES) if job.name == "gpu tests")
    run = [Path(argument) for argument in tests if argument.startswith("tests/")]
    marked = gpu_test_modules()
    assert len(marked) > 8
    assert [path for path in marked if not any(path == given or given in path.parents for given in run)] == []


@pytest.mark.slow
def test_tests_for_a_gpu_need_no_package_that_only_developers_have() -> None:
    """One that cannot be imported ends pytest's collection, and then none of them runs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = [text for name in ("dev", "serve", "ray", "viz", "plot") for text in extras[name]]
    names = {re.split(r"[\[>=]", text)[0].lower() for text in wanted}
    modules = {module for module, owners in packages_distributions().items() if names & {o.lower() for o in owners}}
    needed = {name.split(".")[0] for name in NEEDED}
    blocked = sorted({*modules, *(name.replace("-", "_") for name in names)} - {*needed, "_pytest", "py"})
    assert "hypothesis" in blocked and "pytest" not in blocked
    imports = [".".join(path.with_suffix("").parts) for path in (Path("tests/conftest.py"), *gpu_test_modules())]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import {', '.join(imports)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_suite"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--dry-run" in done.stderr


def test_what_is_missing_is_found_out_without_importing() -> None:
    assert is_installed("torch")
    assert not is_installed("no_such_package.module")


def test_one_failure_loses_nothing_else() -> None:
    outcomes = run(
        Job("fails", script(f"{MEASURE}; raise SystemExit('broken')"), 60),
        Job("hangs", hangs_after(Measurement("g", "c", "llmc", (1.0, 2.0), bytes=8.0)), 1),
        Job("needs", script("pass"), 60, needs=("fails",)),
        Job("works", script(MEASURE), 60),
    )
    assert outcomes["fails"].status == "failed with exit code 1"
    assert "broken" in outcomes["fails"].tail
    assert outcomes["hangs"].status == "timed out"
    assert outcomes["needs"].status == "not run: fails failed with exit code 1"
    assert outcomes["works"].status == "ok"
    expected = (Measurement("g", "c", "llmc", (1.0, 2.0), bytes=8.0),)
    assert all(outcomes[name].measurements == expected for name in ("fails", "hangs", "works"))


def test_results_are_saved_after_every_job(tmp_path: Path) -> None:
    saved: list[list[str]] = []
    planned = (
        Job("a", script(MEASURE), 60),
        Job("b", script("raise SystemExit(3)"), 60),
        Job("c", script(MEASURE), 60),
    )
    run_jobs(planned, 60.0, Console(file=io.StringIO()), lambda outcomes: saved.append([o.job for o in outcomes]))
    assert saved == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_some_jobs_come_with_what_they_need() -> None:
    names = [job.name for job in selected(jobs(Path("d"), SHAPES), ["llmc llama-3.2"])]
    assert names == ["prepare llama-3.2-1b", "probe", "llmc llama-3.2-1b"]
    assert selected(jobs(Path("d"), SHAPES), []) == jobs(Path("d"), SHAPES)
    for job in selected(jobs(Path("d"), SHAPES), ["kernels"]):
        assert not job.after and not job.needs


def test_a_quantized_engine_is_built_from_the_plain_ones_checkpoint() -> None:
    names = [job.name for job in selected(jobs(Path("d"), SHAPES), ["llmc llama-3.1-8b int4"])]
    assert names[-2:] == ["prepare llama-3.1-8b int4", "llmc llama-3.1-8b int4"]
    assert "prepare llama-3.1-8b" in names


def test_jobs_beside_run_at_the_same_time_and_are_waited_for(tmp_path: Path) -> None:
    script_of = "from pathlib import Path; ended, begun = (Path({0!r}) / name for name in ('ended', 'begun'))\n"
    folder = script_of.format(str(tmp_path))
    outcomes = run(
        Job("slow", script(f"{folder}while not begun.exists(): pass\nended.touch()"), 600, True),
        Job("first", script(f"{folder}assert not ended.exists(); begun.touch()"), 600),
        Job("second", script(f"{folder}assert ended.exists()"), 600, needs=("slow",)),
    )
    assert [o.status for o in outcomes.values()] == ["ok", "ok", "ok"], outcomes


def test_a_spent_budget_ends_what_runs_and_skips_the_rest() -> None:
    outcomes = run(Job("hangs", script("import time; time.sleep(60)"), 50), Job("late", script("pass"), 50), budget=1)
    assert outcomes["hangs"].status == "timed out"
    assert outcomes["late"].status == "not run: the budget is spent"


def test_tables_give_ratios_and_shares_of_the_measured_ceilings() -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    measured = [
        Measurement("probe", "copy", "torch", (2.0,), bytes=8e12),
        Measurement("probe", "bf16 product", "cuBLAS", (1.0,), flops=800e12),
        Measurement("m", "decode", "llmc", (0.001, 0.001, 0.001), bytes=3e9),
        Measurement("m", "decode", "HF eager", (0.004,), bytes=3e9),
        Measurement("m", "decode", "llmc int4", (0.0004,)),
        Measurement("m", "prefill", "llmc", (0.1,), flops=40e12),
    ]
    for table in tables(measured):
        console.print(table)
    text = output.getvalue()
    assert "4.00x" in text
    assert "0.40x" in text, "bf16 of int4's speed"
    assert "75%" in text, "3 TB/s of 4"
    assert "50%" in text, "400 TFLOP/s of 800"


def test_the_record_holds_everything(tmp_path: Path) -> None:
    outcome = Outcome("j", "ok", 1.0, (Measurement("g", "c", "llmc", (1.0,)),))
    path = write_results([outcome], "NVIDIA H200", tmp_path / "r.json")
    assert json.loads(path.read_text())["outcomes"][0]["measurements"][0]["case"] == "c"
    assert parse("noise") is None


@pytest.mark.parametrize("shape", SHAPES)
def test_counted_weights_are_those_of_the_checkpoint(shape: str) -> None:
    """Of a model with the same shape in small: matrices that each token is multiplied with, norms left out."""
    config = {**CONFIGS[shape], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    generator = torch.Generator().manual_seed(0)
    tensors = (
        outer_tensors(config, generator) | layer_tensors(config, 0, generator) | layer_tensors(config, 1, generator)
    )
    matrices = sum(t.numel() for t in tensors.values() if t.ndim == 2)
    tied = 0 if config["tie_word_embeddings"] else 50 * 64
    assert matrix_elements(config) == matrices - tied
    assert decode_bytes(config, Decode(3, 10)) == 2 * matrix_elements(config) + 3 * 10 * 2 * 2 * 2 * 16 * 2
    assert prefill_flops(config, Prefill(1)) >= 2 * matrix_elements(config)
