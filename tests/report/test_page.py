"""The page: one file that needs nothing else, whatever a model's strings hold, and the same for the same engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.reader import REPORT_NAME
from llmc.program import Origin
from llmc.report.contents import EngineContents, read_contents
from llmc.report.machine_code import BudgetRow
from llmc.report.page.page import report_page, script, script_json
from tests.conftest import DRAFT
from tests.runtime.tiny_engine import write_tiny_engine
from tests.tiny_models import tiny_checkpoint

# From another machine's llmc a model's name may hold anything.
NASTY = '</script><script>alert(1)</script><!-- "quoted" \\ \u2028 & <b>'


@pytest.fixture(scope="module")
def contents(draft_engine: Path) -> EngineContents:
    return contents_of(draft_engine)


def contents_of(path: Path) -> EngineContents:
    directory = read_engine(path)
    return read_contents(directory.files, directory.manifest, directory.program)


def data_of(page: str) -> Any:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_the_page_in_the_engine_is_what_report_writes(draft_engine: Path, contents: EngineContents) -> None:
    assert (draft_engine / REPORT_NAME).read_text(encoding="utf-8") == report_page(contents)


def test_it_asks_nothing_of_a_network(contents: EngineContents) -> None:
    page = report_page(contents)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert "@import" not in page
    assert "url(" not in page
    assert not re.search(r"\b(fetch|eval|Function|import)\(|XMLHttpRequest|WebSocket|innerHTML|outerHTML", script())


def test_a_kernel_shows_its_budget_where_the_machine_code_was_read(contents: EngineContents) -> None:
    row = BudgetRow("barriers", 2.0, "≤ 0", False, "warps wait for each other")
    name = contents.program.launches[0].kernel
    classes = data_of(report_page(contents, budgets={name: {"sm_90": (row,)}}))["kernels"]["classes"]
    expected = {"figure": "barriers", "value": 2.0, "bound": "≤ 0", "is_met": False, "reason": row.reason}
    for entry in classes:
        assert entry.get("budgets") == ({"sm_90": [expected]} if entry["kernel"] == name else None)


def test_strings_of_a_model_stay_strings(contents: EngineContents) -> None:
    launch = replace(contents.program.launches[0], origin=Origin((NASTY,), NASTY, NASTY))
    program = replace(contents.program, launches=(launch, *contents.program.launches[1:]))
    model = replace(contents.manifest.model, name=NASTY)
    changed = replace(contents, program=program, manifest=replace(contents.manifest, model=model))
    page = report_page(changed)
    assert page.count("<script") == report_page(contents).count("<script") == 2
    assert page.count("</script>") == 2
    data = data_of(page)
    assert data["engine"]["model"]["name"] == NASTY
    assert data["kernels"]["launches"][0]["source"] == NASTY
    assert json.loads(script_json({"a": NASTY})) == {"a": NASTY}


def test_graphs_passes_and_launches_are_all_there(contents: EngineContents) -> None:
    data = data_of(report_page(contents))
    assert data["graphs"][0]["stage"] == "captured"
    assert data["graphs"][-1]["stage"] == "optimized"
    assert len(data["passes"]) == len(contents.passes)
    last = data["graphs"][-1]
    text = dict(enumerate(contents.graphs[-1][2].splitlines()[1:-1]))
    assert [data["lines"][number] for number in last["nodes"]] == list(text.values())
    assert any(count == 2 for graph in data["graphs"] for _, _, count in graph["repeats"])
    kernels = data["kernels"]
    assert len(kernels["launches"]) == len(contents.program.launches)
    for launch in kernels["launches"]:
        kernel = kernels["classes"][launch["class"]]
        assert kernel["kernel"].removeprefix("loop") in launch["call"] or kernel["kernel"] in launch["call"]
        assert kernel.get("text") or kernel["file"] in kernels["code"]
    assert sum(row["bytes"] for row in data["memory"]["weights"]) == contents.manifest.memory["weights"]


def test_a_loop_has_its_own_code(tmp_path: Path) -> None:
    build(DRAFT, tmp_path / "loops.llmc", max_model_len=64, disable_passes=("fuse_gated_activation",))
    kernels = data_of(report_page(contents_of(tmp_path / "loops.llmc")))["kernels"]
    loops = [kernel for kernel in kernels["classes"] if kernel["kernel"].startswith("loop")]
    assert loops and all("for (" in loop["text"] for loop in loops)


def test_a_reference_engine_has_a_page_too(tmp_path: Path) -> None:
    data = data_of(report_page(contents_of(write_tiny_engine(tmp_path / "tiny.llmc"))))
    assert data["engine"]["kind"] == "reference"
    assert data["kernels"]["launches"] == []


# The page of 6 layers, more than six times over, is larger than that of 32.
@pytest.mark.parametrize("layers", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_32_layers_stay_under_10_megabytes(layers: int, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=layers)
    build(model, tmp_path / "deep.llmc", target="reference")
    page = (tmp_path / "deep.llmc" / REPORT_NAME).read_text(encoding="utf-8")
    assert len(page.encode()) * 32 / layers < 10e6
    repeats = [repeat for graph in data_of(page)["graphs"] for repeat in graph["repeats"]]
    assert max(count for _, _, count in repeats) >= layers - 1
