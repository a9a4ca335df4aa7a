"""The table of what engines execute and who runs them agrees with what can be built, and with the executors' files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.codegen.target_kind import KINDS
from llmc.engine_format.engine_kinds import ENGINE_KINDS, EXECUTOR_NAMES, GRAPH_NAME, MODEL_NAME, kind_of_engine
from llmc.errors import OptionError
from llmc.runtime.executors.opening import chosen_executor
from llmc.targets import known_targets
from tests.parsed_source import parsed


def engine(target: str, *files: str) -> Any:
    manifest = SimpleNamespace(target=SimpleNamespace(name=target), files=files)
    return SimpleNamespace(manifest=manifest)


def test_each_kind_of_target_has_a_row_of_its_own() -> None:
    rows = {type(target): kind_of_engine(target.name) for target in known_targets()}
    assert rows.keys() == KINDS.keys()
    assert len(set(rows.values())) == len(rows) == len(ENGINE_KINDS)
    assert kind_of_engine("h100,a100") is kind_of_engine("h100")


def test_each_executor_has_a_place_and_a_function_that_opens() -> None:
    runners = [runner for kind in ENGINE_KINDS for runner in kind.runners]
    assert sorted({runner.name for runner in runners}) == sorted(EXECUTOR_NAMES)
    ranked = [runner.opens_ranks for runner in runners if runner.opens_ranks is not None]
    for module, function in (*(runner.opens for runner in runners), *ranked):
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        assert function in {getattr(node, "name", None) for node in parsed(Path(spec.origin)).body}


def test_the_first_runs_engines_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert chosen_executor(engine("h100"), None) == "cuda"
    assert chosen_executor(engine("cpu-x86-64-v4"), None) == "cpp"
    assert chosen_executor(engine("reference", GRAPH_NAME), None) == "reference"
    assert chosen_executor(engine("onnxruntime", MODEL_NAME), None) == "onnxruntime"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen_executor(engine("h100,a100"), None) == "triton_interpreter"


def test_one_that_cannot_is_refused_with_those_that_can() -> None:
    assert chosen_executor(engine("h100", GRAPH_NAME), "reference") == "reference"
    with pytest.raises(OptionError, match="is run by cuda or triton_interpreter or ptx, not by 'reference'"):
        chosen_executor(engine("h100"), "reference")
