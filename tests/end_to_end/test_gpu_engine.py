"""An engine for two GPUs, built without one: each has its own kernels, and the right ones are found."""

from __future__ import annotations

import pytest

from llmc.compiler import build
from llmc.engine_format import EngineDirectory, read_engine
from llmc.errors import EngineFormatError
from llmc.runtime.device import Device
from llmc.runtime.device_binaries import binaries_for
from tests.cli.command import llmc
from tests.tiny_models import tiny_checkpoint

# Two tokens a step need few kernels; many need those with tensor descriptors.
OPTIONS = {"dtype": "bfloat16", "max_model_len": 64, "max_sequences": 2, "max_logit_rows": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    folder = tmp_path_factory.mktemp("two")
    model = tiny_checkpoint("llama", folder / "model")
    build(str(model), folder / "e.llmc", target="a100,h100", max_batch_tokens=2, **OPTIONS)
    return read_engine(folder / "e.llmc", check_machine=False)


def test_each_target_has_its_own_program(engine: EngineDirectory) -> None:
    assert [each.target for each in engine.programs] == ["a100", "h100"]
    a100, h100 = (each.program for each in engine.programs)
    assert a100.weights == h100.weights
    for program, arch, folder in ((a100, "sm_80", "kernels/a100"), (h100, "sm_90", "kernels/h100")):
        for kernel in program.launched_kernels():
            assert set(kernel.binaries) == {arch}
            assert kernel.binaries[arch].file.startswith(folder)
            assert (engine.path / kernel.binaries[arch].file).read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("name", "capability", "arch"), [("NVIDIA H100", (9, 0), "sm_90"), ("NVIDIA A10", (8, 6), "sm_80")]
)
def test_a_device_gets_its_own(engine: EngineDirectory, name: str, capability: tuple[int, int], arch: str) -> None:
    told: list[str] = []
    found = binaries_for(engine, Device(0, name, capability, 1), told.append)
    assert (found.arch, told) == (arch, [])
    assert found.program == engine.programs[arch == "sm_90"].program


def test_inspect_shows_both(engine: EngineDirectory) -> None:
    shown = llmc("inspect", engine.path)
    assert shown.code == 0, shown.err
    for name in ("a100", "h100"):
        assert f"on {name}, predicted and not measured" in " ".join(shown.out.split())
    assert "matmul" in shown.out
    prefill = llmc("inspect", engine.path, "--prefill", "2")
    assert "prefill of 2 tokens on" in " ".join(prefill.out.split())


def test_a_missing_program_is_noticed(engine: EngineDirectory) -> None:
    path = engine.path / "programs/h100.json"
    text = path.read_text()
    path.write_text(text + " ")
    try:
        with pytest.raises(EngineFormatError, match=r"too long|hash"):
            read_engine(engine.path, check_machine=False)
    finally:
        path.write_text(text)
