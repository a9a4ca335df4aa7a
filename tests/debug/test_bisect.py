"""Bisection names the planted rewrite, takes log₂ runs, and leaves a directory that shows the fault."""

from __future__ import annotations

import json
import math
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from llmc.compiler import build
from llmc.debug import cut_checks
from llmc.debug.bisect import Culprit, Outcome, Outline, Pipeline, bisect, cut_graph, outline, with_made_nodes
from llmc.debug.cut_checks import CommandCheck, LogitCheck, SpeedCheck
from llmc.debug.difference import difference
from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.debug.region import changed_region
from llmc.debug.reproduction import write_reproduction
from llmc.errors import OptionError
from llmc.frontends.captured import Captured
from llmc.graph.render import render
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import has_selected_logits
from llmc.options import BuildOptions
from llmc.passes import Pass, extended
from llmc.passes.pipeline import essential
from llmc.passes.runner import run_pipeline
from tests.debug.planted_faults import FAULTS, crash, swapped_halves
from tests.family_captures import FamilyCaptures
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_model, tiny_tokens

OPTIONS = BuildOptions()
TOKENS = tiny_tokens(21)


@dataclass(frozen=True)
class Case:
    """A llama, a pipeline and what bisection needs of both."""

    pipeline: Pipeline
    runner: MemoRun
    whole: Outline
    check: LogitCheck


@pytest.fixture(scope="module")
def llama(captured_family: FamilyCaptures) -> Captured:
    return captured_family("llama").captured


@pytest.fixture(scope="module")
def cases(llama: Captured) -> Callable[..., Case]:
    """`cases(pass, …)`: the llama's pipeline with these passes, run to its end once."""

    @cache
    def made(*added: Pass) -> Case:
        return case(llama, *added)

    return made


def case(captured: Captured, *added: Pass) -> Case:
    passes = extended(*added)
    runner = MemoRun(captured.source, TOKENS, chunk_sizes=default_chunks(len(TOKENS)), block_size=OPTIONS.block_size)
    reference = runner.logits(captured.graph)
    pipeline = Pipeline(captured, passes, OPTIONS)
    return Case(pipeline, runner, outline(pipeline), LogitCheck(pipeline, runner, reference, 1e-4))


# The others are found by tests/debug/test_pass_diff.py.
@pytest.mark.parametrize("name", quick_sample(FAULTS, ["slot_off_by_one"]))
def test_a_wrong_rewrite_is_found_and_shown(
    cases: Callable[..., Case], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, node = FAULTS[name]
    made = cases(fault)
    culprit = bisect(made.whole, made.check)
    assert culprit.pass_name == name
    assert culprit.rewrite is not None and node in culprit.rewrite.nodes
    assert culprit.good == culprit.bad - 1
    spans = made.whole.spans()
    inside = max(last - first + 1 for _, first, last in spans)
    assert len(culprit.probes) <= 2 + math.ceil(math.log2(len(spans))) + math.ceil(math.log2(inside))

    directory = _reproduction(made, culprit, tmp_path / "found")
    script = (directory / "repro.py").read_text()
    assert script.count("torch.ops.llmc.") >= 2 and script.count("torch.ops.") < 24, "the smallest graphs, not all"
    assert node in (directory / "before.txt").read_text()
    assert "culprit" not in (directory / "README.md").read_text() and name in (directory / "README.md").read_text()
    assert run_script(directory / "repro.py") == 1
    assert "TOO LARGE" in capsys.readouterr().out
    data = json.loads((directory / "culprit.json").read_text())
    assert data["pass_name"] == name and data["local"]["max"] > 0


@pytest.mark.slow
def test_an_innocent_rewrite_shows_no_fault(cases: Callable[..., Case], tmp_path: Path) -> None:
    made = cases()
    (number,) = [r.number for name, r in made.whole.rewrites if name == "merge_qkv"][:1]
    name, rewrite = made.whole.at(number)
    innocent = Culprit(name, "reorder", rewrite, number - 1, number, made.check(number), ())
    directory = _reproduction(made, innocent, tmp_path / "found")
    done = subprocess.run([sys.executable, directory / "repro.py"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


def test_a_pass_that_raises_is_found_down_to_the_rewrite(cases: Callable[..., Case], tmp_path: Path) -> None:
    made = cases(crash)
    culprit = bisect(made.whole, made.check)
    assert culprit.pass_name == "crash" and culprit.rewrite is not None
    assert culprit.outcome.detail == "pass crash: KeyError: 'a mistake in the pass'"
    numbers = [r.number for name, r in made.whole.rewrites if name == "crash"]
    assert culprit.bad == numbers[5] == numbers[-1]
    before = cut_graph(made.pipeline, culprit.good)
    write_reproduction(tmp_path / "found", culprit, before, None, None, ["llmc", "bisect"])
    assert sorted(p.name for p in (tmp_path / "found").iterdir()) == ["README.md", "check.sh", "culprit.json", "graphs"]


def test_there_may_be_nothing_to_find(cases: Callable[..., Case]) -> None:
    made = cases()
    with pytest.raises(OptionError, match="the check holds for the whole pipeline"):
        bisect(made.whole, made.check)
    with pytest.raises(OptionError, match=r"the pipeline has [0-9]+ rewrites"):
        bisect(made.whole, made.check, good=10_000)


def test_a_check_that_always_fails_blames_no_rewrite(cases: Callable[..., Case]) -> None:
    made = cases()
    command = CommandCheck("exit 3", made.pipeline, made.runner)
    with pytest.raises(OptionError, match=r"fails already there \(exit code 3"):
        bisect(made.whole, command)


def test_a_users_command_decides_on_graph_and_logits(cases: Callable[..., Case], tmp_path: Path) -> None:
    """The command knows of the fault only what it finds in the files that it is given."""
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys\n"
        "from safetensors.numpy import load_file\n"
        "assert load_file(os.environ['LLMC_BISECT_LOGITS'])['logits'].shape == (21, 160)\n"
        "text = open(sys.argv[1]).read()\n"
        "print(f'rewrite {sys.argv[2]}', file=sys.stderr)\n"
        "sys.exit(text.count('aten.cat([') > int(sys.argv[3]))\n"
    )
    made = cases(swapped_halves)
    first = next(r.number for name, r in made.whole.rewrites if name == "swapped_halves")
    known = render(cut_graph(made.pipeline, first - 1)).count("aten.cat(")
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {{graph}} {{number}} {known}"
    check = CommandCheck(command, made.pipeline, made.runner)
    good, bad = check(first - 1), check(first)
    assert good.is_good and not bad.is_good
    assert bad.detail == f"exit code 1 rewrite {first}"


def test_a_users_command_may_run_an_engine(cases: Callable[..., Case]) -> None:
    made = cases()

    def build(number: int, engine: Path) -> None:
        engine.mkdir()
        (engine / f"cut at {number}").touch()

    check = CommandCheck('test -f {engine}/"cut at 3"', made.pipeline, made.runner, build)
    assert check(3).is_good and not check(2).is_good


def test_a_command_that_does_not_exist(cases: Callable[..., Case]) -> None:
    made = cases()
    check = CommandCheck("/no/such/command", made.pipeline, made.runner)
    with pytest.raises(OptionError, match="the command cannot be run"):
        check(0)


def test_engines_are_cut_where_the_rest_allows_it(llama: Captured, cases: Callable[..., Case]) -> None:
    """The fault sits between passes that every engine needs; only the others are left out."""
    made = cases(swapped_halves)

    def check(number: int) -> Outcome:
        options = BuildOptions(stop_after=number, finish_cut=True)
        graph = run_pipeline(llama.graph, made.pipeline.passes, options, essential=essential()).graph
        assert graph.stage in (Stage.SERVING, Stage.OPTIMIZED)
        assert has_selected_logits(graph)
        change = difference(made.runner.logits(graph), made.check.reference)
        return Outcome(change.within(1e-4), f"{change.relative:.1e}")

    culprit = bisect(made.whole, check, uncut=essential())
    assert culprit.pass_name == "swapped_halves" and len(culprit.probes) <= 5


def test_a_cut_engine_can_be_built(tmp_path: Path) -> None:
    """Without the end of the pipeline there is none, so that is finished whatever the cut."""
    model = tiny_model("llama", num_hidden_layers=1)
    engine = build(model, tmp_path / "engine.llmc", target="reference", stop_after=0, finish_cut=True, strict=False)
    names = {record.name for record in engine.passes if record.rewrites}
    assert "page_kv_cache" in names and names <= essential()


def test_a_slowdown_is_found(cases: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that depend on the engine alone: every rewrite from one on makes it twice as slow."""
    made = cases()
    optional = [r.number for name, r in made.whole.rewrites if name not in essential()]
    slow = optional[len(optional) // 2]
    built: list[int] = []

    def note(number: int, path: Path) -> None:
        built.append(number)
        path.write_text(str(number))

    def seconds(paths: list[Path], tokens: object) -> list[float]:
        return [2e-3 if int(p.read_text()) >= slow else 1e-3 for p in paths]

    monkeypatch.setattr(cut_checks, "decode_seconds", seconds)
    culprit = bisect(made.whole, SpeedCheck(note, TOKENS, 1.5, 0, tmp_path), uncut=essential())
    assert culprit.bad == slow
    assert culprit.outcome.detail == "2000 µs a decode step, 2.00 × the 1000 µs of #0"
    assert len(built) == len(set(built)), "each engine is built once"


def test_decode_steps_are_measured(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    build(model, tmp_path / "engine.llmc", target="reference", max_model_len=64)
    both = cut_checks.decode_seconds([tmp_path / "engine.llmc"] * 2, TOKENS)
    assert len(both) == 2 and all(seconds > 0 for seconds in both)


def test_a_directory_that_holds_something_is_left_alone(
    llama: Captured, cases: Callable[..., Case], tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    made = cases(crash)
    culprit = Culprit("crash", "exact", None, 0, 1, made.check(0), ())
    with pytest.raises(OptionError, match="the directory is not empty"):
        write_reproduction(tmp_path, culprit, llama.graph, None, None, [])
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def run_script(path: Path) -> int:
    """The exit code of a script that is run in this process."""
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code


def _reproduction(made: Case, culprit: Culprit, directory: Path) -> Path:
    before, after = cut_graph(made.pipeline, culprit.bad - 1), cut_graph(made.pipeline, culprit.bad)
    piece = changed_region(before, after, made.runner, made.pipeline.captured.source)
    return write_reproduction(
        directory, with_made_nodes(culprit, after), before, after, piece, ["llmc", "bisect", "model"]
    ).directory
