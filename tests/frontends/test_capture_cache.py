"""Captured graphs as text and in the cache: what is read back compiles to the same, and nothing stale is found."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.cache import directory
from llmc.errors import EngineFormatError
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers import capture_cache
from llmc.frontends.transformers.capture_cache import capture_entry, find_capture, keep_capture
from llmc.frontends.transformers.capture_text import captured_graph, captured_text
from llmc.graph.model_graph import ModelGraph
from llmc.graph.render import render
from llmc.graph.weights import Constant
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.settings import read_settings
from tests.family_captures import FamilyCaptures
from tests.quantized_checkpoints import write_quantized
from tests.quick_sample import quick_sample
from tests.sparse_checkpoints import bitmask_writer, sparsity_config
from tests.tiny_models import tiny_checkpoint, tiny_model

AT = Path("capture.txt")


def text_of(graph: ModelGraph) -> str:
    text = captured_text(graph)
    assert text is not None
    return text


# Mixtral's experts are stored apart: its weights are made of several.
@pytest.mark.parametrize("family", quick_sample(["gemma2", "gpt2", "mixtral"], ["gemma2", "mixtral"]))
def test_what_is_read_back_compiles_to_the_same(family: str, captured_family: FamilyCaptures) -> None:
    graph = captured_family(family).captured.graph
    read = captured_graph(text_of(graph), AT)
    assert render(read) == render(graph) and read.info == graph.info
    assert text_of(read) == text_of(graph)
    first, second = (run_pipeline(captured, default(), BuildOptions()) for captured in (graph, read))
    assert render(second.graph) == render(first.graph)
    assert [(r.rewrites, r.refusals) for r in second.records] == [(r.rewrites, r.refusals) for r in first.records]
    constants = [r.value for r in first.graph.weights.values() if isinstance(r, Constant)]
    again = [r.value for r in second.graph.weights.values() if isinstance(r, Constant)]
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(constants, again, strict=True))


def test_what_the_grammar_lacks_is_not_written(captured_family: FamilyCaptures) -> None:
    graph = captured_family("llama").captured.graph.copy()
    name = next(name for name, recipe in graph.weights.items() if isinstance(recipe, Constant))
    graph.weights[name] = Constant(torch.zeros(1 << 20))
    assert captured_text(graph) is None
    graph = captured_family("llama").captured.graph.copy()
    node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
    node.target = torch.mul
    assert captured_text(graph) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 999),
        (("nodes", -2, "target"), "os.system.default"),
        (("nodes", -2, "target"), "aten.__class__.default"),
        (("nodes", -2, "args"), [{"node": "nowhere"}]),
        (("nodes", 0, "name"), "not a name"),
        (("tokens", "range"), None),
    ],
)
def test_what_was_not_written_is_not_read(
    path: tuple[Any, ...], value: object, captured_family: FamilyCaptures
) -> None:
    content = json.loads(text_of(captured_family("llama").captured.graph))
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(EngineFormatError, match="cannot be read"):
        captured_graph(json.dumps(content), AT)


def test_a_process_with_transformers_leaves_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes may have been patched."""
    monkeypatch.setattr(capture_cache, "settings", lambda: read_settings({}))
    importlib.import_module("transformers")
    assert capture_entry(open_model(tiny_checkpoint("llama", tmp_path)), BuildOptions()) is None


def test_an_entry_is_of_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights without their zeros the model knows the shape alone."""
    monkeypatch.setattr(capture_cache, "settings", lambda: read_settings({"LLMC_CAPTURE_CACHE": "always"}))
    model = tiny_model("llama", num_hidden_layers=1)
    write_quantized(tmp_path, model, sparsity_config("sparse-bitmask"), bitmask_writer(of_four=False))
    file, entries = tmp_path / "model.safetensors", [capture_entry(open_model(tmp_path), BuildOptions())]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".compressed"))
    for change in (tensors[name] + 1, tensors[name].half()):
        save_file(tensors | {name: change}, file, metadata={"format": "pt"})
        entries.append(capture_entry(open_model(tmp_path), BuildOptions()))
    assert entries[0] is not None and entries[1] == entries[0] != entries[2]


def test_a_damaged_or_outdated_entry_is_not_found(
    tmp_path: Path, captured_family: FamilyCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(directory, "settings", lambda: read_settings(os.environ))
    graph, name = captured_family("llama").captured.graph, "entry.txt"
    source = tmp_path / "modeling.py"
    source.write_text("", encoding="utf-8")
    monkeypatch.setattr("transformers.__file__", str(source))
    assert find_capture(name) is None
    keep_capture(name, graph, ("said",))
    kept = find_capture(name)
    assert kept is not None and render(kept.graph) == render(graph) and kept.notes == ("said",)
    entry = tmp_path / "cache" / "captures" / name
    assert list(entry.parent.iterdir()) == [entry]
    source.write_text("patched = True", encoding="utf-8")
    assert find_capture(name) is None
    keep_capture(name, graph)
    assert find_capture(name) is not None
    whole = entry.read_bytes()
    for broken in (whole[:-100], whole.replace(b"aten.mul.Tensor", b"aten.add.Tensor", 1), b"", b"\xff"):
        entry.write_bytes(broken)
        assert find_capture(name) is None


# Captures, and says which entry it used, and those of other dtypes and configs, whether transformers was needed, and
# what was captured.
CAPTURE = """
import json, sys
from pathlib import Path
import llmc.ops
from llmc.frontends.capture import capture
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers.capture_cache import capture_entry
from llmc.graph.render import render
from llmc.options import BuildOptions
model, changed = map(Path, sys.argv[1:])
places = [(model, "auto"), (model, "bfloat16"), (changed, "auto")]
entries = [capture_entry(open_model(place), BuildOptions(dtype=dtype)) for place, dtype in places]
text = render(capture(model, BuildOptions()).graph)
print(json.dumps([entries, "transformers" in sys.modules, text]))
"""


@pytest.mark.slow
def test_the_second_process_finds_the_capture(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    changed = shutil.copytree(model, tmp_path / "changed")
    config = (changed / "config.json").read_text(encoding="utf-8").replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1')
    (changed / "config.json").write_text(config, encoding="utf-8")

    def captured() -> list[Any]:
        command = [sys.executable, "-c", CAPTURE, str(model), str(changed)]
        environment = {**os.environ, "LLMC_CACHE_DIR": str(tmp_path / "cache")}
        printed = subprocess.run(command, check=True, capture_output=True, env=environment, text=True).stdout
        names: list[Any] = json.loads(printed)
        return names

    entries, imported, text = captured()
    assert imported and len(set(entries)) == 3
    assert [file.name for file in (tmp_path / "cache" / "captures").iterdir()] == entries[:1]
    assert captured() == [entries, False, text]


def test_the_name_is_the_directorys(captured_family: FamilyCaptures) -> None:
    graph = captured_family("llama").captured.graph
    graph = replace(graph, info=replace(graph.info, name="elsewhere"))
    assert captured_graph(text_of(graph), AT).info.name == "elsewhere"
