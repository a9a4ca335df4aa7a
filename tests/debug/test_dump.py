"""LLMC_DUMP: one text file a pass, that differ only where the pass changed something."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.debug.dump import GraphDump
from llmc.errors import LlmcError
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import Pass, Rewrite, default, extended
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCaptures


def dump(graph: ModelGraph, directory: Path, *passes: Pass) -> dict[str, list[str]]:
    run_pipeline(graph, passes, BuildOptions(), GraphDump(directory, graph))
    return {path.name: path.read_text().splitlines() for path in sorted(directory.iterdir())}


def changed(before: list[str], after: list[str]) -> list[str]:
    return [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[0] in "+-"][2:]


def test_a_file_after_every_pass_that_diffs_cleanly(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    files = dump(captured_family("llama").captured.graph, tmp_path / "dump", *default())
    names = list(files)
    assert names[0] == "00-captured.txt" and names[1] == "01-remove_export_residue.txt"
    assert len(names) == len(default()) + 1
    by_pass = {name[3:-4]: index for index, name in enumerate(names)}
    index = by_pass["fuse_rope_kv_write"]
    lines = changed(files[names[index - 1]], files[names[index]])
    # Two ropes, a write and the attention that reads it, in each of two layers; nothing else is touched.
    assert lines and all(any(op in line for op in ("rope", "kv_write", "paged_attention")) for line in lines)
    assert changed(files[names[by_pass["fuse_silu"] - 1]], files[names[by_pass["fuse_silu"]]]) == []


def test_an_unrelated_rewrite_renames_nothing(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    def norm(x: Any, weight: Any, eps: Any) -> Any:
        return torch.ops.llmc.rms_norm.default(x, weight, eps)

    def other(x: Any, weight: Any, eps: float) -> Any:
        return torch.ops.llmc.rms_norm.default(x, weight, 0.5)

    first = Rewrite(
        "first",
        (norm,),
        other,
        applies=lambda m: m.bound["weight"].name == "model_norm_weight" and m.bound["eps"] != 0.5,
        after="check_canonical",
    )
    graph = captured_family("llama").captured.graph
    plain, more = dump(graph, tmp_path / "a", *default()), dump(graph, tmp_path / "b", *extended(first))
    lines = changed(list(plain.values())[-1], list(more.values())[-1])
    assert [line.replace("1e-06", "0.5")[1:] for line in lines[:1]] == [line[1:] for line in lines[1:]], lines


def test_files_of_an_earlier_run_are_replaced(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    graph = captured_family("llama").captured.graph
    (tmp_path / "99-old.txt").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")
    assert sorted(dump(graph, tmp_path, *default()[:1])) == [
        "00-captured.txt",
        "01-remove_export_residue.txt",
        "mine.txt",
    ]


def test_a_place_that_cannot_be_written(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmcError):
        GraphDump(tmp_path / "file", captured_family("llama").captured.graph)
