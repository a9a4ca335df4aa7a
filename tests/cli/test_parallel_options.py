"""`llmc build --parallel auto`: the simulator's best division is what is built, or what stands in its way is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.cli.parallel_options import ParallelOptions
from llmc.compiler import build, compile
from llmc.engine_format.manifest import read_manifest
from llmc.errors import OptionError
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.simulation.choose_division import DivisionWish, consider_divisions
from llmc.targets import resolve_target
from tests.tiny_models import tiny_checkpoint

ONE_RANK: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": None}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text('{"arrival": 0.0, "prompt_tokens": 20, "output_tokens": 8}\n' * 3)
    return path


def test_the_best_division_is_taken_and_the_others_are_shown(
    checkpoint: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ParallelOptions("auto", ranks=2, trace=trace)
    sizes = plan.divide(checkpoint, resolve_target("h100"), ONE_RANK, default())
    shown = capsys.readouterr().out
    assert f"builds TP {sizes['tensor_parallel_size']} × PP {sizes['pipeline_parallel_size']}" in shown
    assert "2 × h100: 3 requests, predicted" in shown
    parse_options({**ONE_RANK, **sizes})


def test_what_does_not_fit_is_told(checkpoint: Path, trace: Path) -> None:
    plan = ParallelOptions("auto", ranks=2, memory=1e-6, trace=trace)
    with pytest.raises(OptionError, match="no division of the ranks of h100 can serve this load"):
        plan.divide(checkpoint, resolve_target("h100"), ONE_RANK, default())


def test_what_does_not_fit_is_told_in_python(checkpoint: Path, trace: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no division of the ranks of h100 can serve this load"):
        build(checkpoint, tmp_path / "engine", target="h100", parallel="auto", ranks=2, memory=1e-6, trace=trace)


@pytest.mark.slow
def test_the_best_division_is_built(checkpoint: Path, trace: Path) -> None:
    """By the rates of this machine, which decide how many ranks it has."""
    with compile(checkpoint, parallel="auto", ranks=2, trace=trace, max_batch_tokens=32) as engine:
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        built = read_manifest(engine.path).options
    assert (built["tensor_parallel_size"], built["pipeline_parallel_size"]) in {(1, 1), (2, 1)}


def test_stages_of_gpus_are_considered(checkpoint: Path, trace: Path) -> None:
    """A model that fits one GPU is faster on one."""
    considered = consider_divisions(
        checkpoint, resolve_target("h100"), DivisionWish("auto", 2, trace=trace), {}, default()
    )
    assert {outcome.division.layout.pipeline for outcome in considered.comparison.outcomes} == {1, 2}
    assert considered.best.layout.pipeline == 1


def test_without_a_plan_nothing_is_done(tmp_path: Path) -> None:
    assert ParallelOptions().divide(tmp_path, resolve_target("h100"), ONE_RANK, ()) == {}


@pytest.mark.parametrize(
    ("plan", "sizes", "problem"),
    [
        (ParallelOptions("best", ranks=2), {}, "unknown plan 'best'"),
        (ParallelOptions("auto"), {}, "an automatic plan needs the number of ranks"),
        (ParallelOptions("auto", ranks=True), {}, "needs the number of ranks, not True"),
        (ParallelOptions("auto", ranks=2, memory=0), {}, "a rank cannot have 0 GB"),
        (ParallelOptions(ranks=2), {}, "ranks applies only to automatic plans"),
        (ParallelOptions("auto", ranks=2), {"tensor_parallel_size": 2}, "the ranks are divided already"),
    ],
)
def test_what_does_not_go_together(plan: ParallelOptions, sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        plan.check({**ONE_RANK, **sizes})
