"""Profiles of real steps: every launch measured, and the same engine found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.debug.profiler import Workload, profile_engine
from llmc.engine_format import read_engine
from llmc.errors import EngineFormatError, OptionError, TargetError
from llmc.files.typed_json import to_json
from llmc.program import DeviceKernel
from llmc.report.profile import Profile, check_profile, kernel_class, read_profile
from tests.runtime.tiny_engine import write_tiny_engine

WORKLOAD = Workload(prefill=32, batch=3, context=20, repeats=3)


@pytest.fixture(scope="module")
def profile(draft_engine: Path) -> Profile:
    return profile_engine(draft_engine, WORKLOAD, threads=1)


def test_every_launch_is_measured_and_predicted(profile: Profile, draft_engine: Path) -> None:
    launches = read_engine(draft_engine).program.launches
    prefill, decode = profile.steps
    assert (prefill.shape.tokens, prefill.shape.logit_rows) == (32, 1)
    assert (decode.shape.tokens, decode.shape.context) == (3, 3 * 21)
    for step in profile.steps:
        assert [timing.launch for timing in step.launches] == list(range(len(launches)))
        assert [timing.kernel for timing in step.launches] == [launch.kernel for launch in launches]
        assert all(timing.seconds >= 0 and timing.predicted > 0 for timing in step.launches)
        assert 0 < sum(timing.seconds for timing in step.launches) <= 2 * step.seconds
        assert step.predicted == pytest.approx(sum(timing.predicted for timing in step.launches))
        assert step.rates.measured
    head = max(decode.launches, key=lambda each: each.predicted)
    assert launches[head.launch].family == "lm_head"


@pytest.mark.slow
def test_steps_of_an_engine_with_states(tmp_path: Path) -> None:
    llmc.build(tiny_architecture("falcon_h1"), tmp_path / "engine.llmc", max_model_len=64)
    profile = profile_engine(tmp_path / "engine.llmc", WORKLOAD, threads=1)
    assert any("linear_attention" in launch.kernel for launch in profile.steps[1].launches)


def test_a_profile_is_read_back(profile: Profile, draft_engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(to_json(profile)), encoding="utf-8")
    assert read_profile(path) == profile
    check_profile(profile, read_engine(draft_engine), path)
    other = replace(profile, target="cpu-portable")
    with pytest.raises(EngineFormatError, match="of another engine"):
        check_profile(other, read_engine(draft_engine), path)
    directory = read_engine(draft_engine)
    fewer = replace(directory.program, launches=directory.program.launches[:-1])
    with pytest.raises(EngineFormatError, match="of another engine"):
        check_profile(profile, replace(directory, program=fewer), path)
    path.write_text('{"version": 99}', encoding="utf-8")
    with pytest.raises(EngineFormatError, match="not a profile of version"):
        read_profile(path)
    with pytest.raises(EngineFormatError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


def test_products_are_told_apart_by_shape(draft_engine: Path) -> None:
    names = {kernel_class(launch) for launch in read_engine(draft_engine).program.launches}
    assert {"linear_bf16 128 → 128", "linear_bf16 384 → 128", "rms_norm_bf16"} <= names


@pytest.mark.parametrize("wrong", [{"prefill": 257}, {"batch": 0}, {"context": 256}, {"repeats": 0}])
def test_what_the_engine_cannot_do_is_said(wrong: dict[str, int], draft_engine: Path) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} cannot be"):
        profile_engine(draft_engine, replace(WORKLOAD, **wrong), threads=1)


def test_a_reference_engine_has_no_kernels(tmp_path: Path) -> None:
    path = write_tiny_engine(tmp_path / "tiny.llmc")
    with pytest.raises(EngineFormatError, match="no kernels to time"):
        profile_engine(path, replace(WORKLOAD, prefill=4, context=4), threads=1)


@pytest.mark.parametrize(
    ("interpreted", "says"), [("1", "interpreted here"), ("0", "the engine was built for a GPU, and there is none")]
)
def test_an_engine_for_a_gpu_is_profiled_on_that_gpu(
    interpreted: str, says: str, draft_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = read_engine(draft_engine)
    kernel = DeviceKernel("k", "kernels/k.py", "k", (), {}, 4, 1)
    manifest = replace(directory.manifest, target=replace(directory.manifest.target, name="h100"))
    device = replace(directory, manifest=manifest, program=replace(directory.program, kernels=(kernel,)))
    monkeypatch.setattr("llmc.debug.profiler.read_engine", lambda path, **options: device)
    monkeypatch.setattr("torch.cuda.init", raise_no_driver)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(TargetError, match=says) as error:
        profile_engine(draft_engine, WORKLOAD, threads=1)
    assert f"llmc report {draft_engine}" in str(error.value.fix)


def raise_no_driver() -> None:
    raise RuntimeError("Found no NVIDIA driver on your system")
