"""The graph of every stage, in every format, from an engine and from a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.cli.viz import rendered
from llmc.debug.viz.drawing import draw
from llmc.debug.viz.stage_graph import STAGES, StageGraph, stage_graph
from llmc.engine_format.manifest import MANIFEST_NAME, manifest_text, read_manifest
from llmc.engine_format.reader import NODES_NAME
from llmc.errors import EngineFormatError, LlmcError, OptionError
from llmc.options import BuildOptions
from tests.conftest import DRAFT as MODEL
from tests.listed_files import file_record
from tests.runtime.tiny_engine import copied


@pytest.fixture(scope="module")
def stages(draft_engine: Path) -> dict[str, StageGraph]:
    return {stage: stage_graph(draft_engine, stage, BuildOptions()) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_keeps_every_stage(stage: str, stages: dict[str, StageGraph]) -> None:
    assert stages[stage].graph.stage == stage
    ops = {node.op for node in stages[stage].graph.nodes if node.op is not None}
    assert ("llmc.attention" in ops) == (stage in ("captured", "canonical"))
    assert ("llmc.paged_attention" in ops) == (stage in ("serving", "optimized"))
    assert ("llmc.rms_norm" in ops) == (stage != "captured")


def test_a_model_gives_what_its_engine_keeps(stages: dict[str, StageGraph]) -> None:
    assert stage_graph(MODEL, "optimized", BuildOptions()).graph == stages["optimized"].graph


def test_pictures_show_identical_layers_once(stages: dict[str, StageGraph]) -> None:
    once, every = (draw(stages["canonical"], flag) for flag in (False, True))
    (layers,) = once.layers
    assert layers.count == 2
    assert len(once.nodes) + 2 * len(layers.nodes) == len(every.nodes)
    assert every.layers == ()
    assert [e for e in once.edges if e.carried], "a layer hands its result to the next"
    drawn = {n.name for n in (*once.inputs, *once.nodes, *layers.nodes)}
    assert {name for e in once.edges for name in (e.source, e.target)} <= drawn
    assert set(once.returns) <= drawn


def test_dot_mermaid_and_json_are_whole(stages: dict[str, StageGraph]) -> None:
    dot, mermaid, text = (rendered(stages["optimized"], form, True).decode() for form in ("dot", "mermaid", "json"))
    content = json.loads(text)
    working = [node for node in content["nodes"] if node["op"] is not None]
    for node in working:
        assert f'"{node["name"]}" [' in dot
        assert f"n_{node['name']}[" in mermaid
    assert "fuse_gated_linear" in dot
    assert any(node["rewrite"] and node["source"] for node in working)


def test_svg_is_laid_out(stages: dict[str, StageGraph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("graphviz")
    if shutil.which("dot") is None:
        pytest.skip("Graphviz's dot is not installed")
    svg = rendered(stages["optimized"], "svg", False).decode()
    assert "<svg" in svg
    assert "paged_attention" in svg
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LlmcError, match="not on the PATH") as caught:
        rendered(stages["optimized"], "svg", False)
    assert "apt install graphviz" in str(caught.value.fix)


def test_unknown_stages_and_stages_not_reached(draft_engine: Path) -> None:
    with pytest.raises(OptionError, match="not a stage"):
        stage_graph(draft_engine, "fused", BuildOptions())
    with pytest.raises(OptionError, match="no graph of stage optimized"):
        stage_graph(MODEL, "optimized", BuildOptions(stop_after=10))


def test_damaged_origins_of_nodes_are_refused(draft_engine: Path, tmp_path: Path) -> None:
    engine = copied(draft_engine, tmp_path / "e.llmc")
    manifest = read_manifest(engine)
    deep = json.loads("[" * 500 + "]" * 500)
    for row in ([1, None], [-1, None], ["x", None], [0, 1], [0], None, [deep, None]):
        content = json.dumps({"sources": ["a line"], "nodes": {"n": row}}).encode()
        (engine / NODES_NAME).write_bytes(content)
        files = {**manifest.files, NODES_NAME: file_record(content)}
        (engine / MANIFEST_NAME).write_text(manifest_text(replace(manifest, files=files)), encoding="utf-8")
        with pytest.raises(EngineFormatError, match=r"no line and rewrite|expected") as caught:
            stage_graph(engine, "captured", BuildOptions())
        assert NODES_NAME in str(caught.value.at) and caught.value.fix
