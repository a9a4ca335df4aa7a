"""Which binaries a device takes, and what is compiled for one that none fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen.triton.compile_engine import device_target_of
from llmc.engine_format import EngineDirectory, EngineFiles, Manifest, ModelRecord, TargetRecord
from llmc.engine_format.reader import TargetProgram
from llmc.engine_format.writer import EngineWriter
from llmc.errors import TargetError
from llmc.program import LIBRARY
from llmc.program.program_json import program_to_json
from llmc.runtime.device import binaries as device_binaries
from llmc.runtime.device.binaries import binaries_for, cache_key, carried_archs, fitting_arch, program_for
from llmc.runtime.device.device import Device
from llmc.settings import settings
from tests.runtime.device.device_program import LIMITS, kernel, program

# With the parameters of the made-up program's kernel.
SOURCE = """
import triton
import triton.language as tl


@triton.jit
def k(x_ptr, w_ptr, k_ptr, ids_ptr, y_ptr, n, stride, big, scale, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), scale)
"""


@pytest.mark.parametrize(
    ("available", "capability", "expected"),
    [
        ({"sm_80", "sm_90"}, (9, 0), "sm_90"),
        ({"sm_80", "sm_90"}, (8, 0), "sm_80"),
        ({"sm_80", "sm_90"}, (8, 9), "sm_80"),
        ({"sm_80", "sm_86", "sm_89"}, (8, 9), "sm_89"),
        ({"sm_80", "sm_86"}, (8, 9), "sm_86"),
        ({"sm_89"}, (8, 0), None),
        ({"sm_90"}, (10, 0), None),
        ({"sm_100"}, (10, 3), None),
        ({"sm_80"}, (9, 0), None),
        ({"gfx942"}, (9, 0), None),
        (set(), (9, 0), None),
    ],
)
def test_fitting_arch(available: set[str], capability: tuple[int, int], expected: str | None) -> None:
    assert fitting_arch(available, capability) == expected


def test_an_instruction_set_counts_only_if_every_kernel_has_it() -> None:
    base = program("sm_80", "sm_90")
    (launch,) = base.launches
    second = replace(kernel("sm_90"), name="k.1")
    unused, library = replace(kernel(), name="k.2"), replace(kernel(), name="k.3", source=LIBRARY)
    kernels = (*base.kernels, second, unused, library)
    launches = (launch, replace(launch, kernel="k.1"), replace(launch, kernel="k.3"))
    assert carried_archs(replace(base, launches=launches, kernels=kernels)) == {"sm_90"}
    assert carried_archs(replace(base, launches=(), kernels=())) == frozenset()


def test_unknown_devices_compile_like_the_newest_known_one_before_them() -> None:
    target = device_target_of(120, 101376)
    assert (target.arch_name, target.binary_kind, target.shared_memory_per_block) == ("sm_120", "cubin", 101376)
    assert device_target_of(89, 1).arch_name == "sm_89"
    assert device_target_of(75, 1).arch_name == "sm_75"


def made_up_engine(path: Path, *archs: str, source: str = "source\n", **targets: tuple[str, ...]) -> EngineDirectory:
    model = ModelRecord("m", "module", 1000, None, "bfloat16", None, (), 1)
    manifest = Manifest("0", model, TargetRecord("h100", None, ()), {}, LIMITS, {}, {}, ())
    programs = tuple(TargetProgram(t, f"programs/{t}.json", program(*a)) for t, a in targets.items())
    first = TargetProgram("h100", "program.json", program(*archs))
    with EngineWriter(path) as writer:
        writer.write_text("kernels/k.py", source)
        writer.write_text("program.json", program_to_json(first.program))
        manifest = writer.finish(manifest)
    return EngineDirectory(
        EngineFiles(path, manifest.files), manifest, first.program, path / "program.json", (), (first, *programs)
    )


def device(capability: tuple[int, int], name: str = "made up") -> Device:
    return Device(0, name, capability, 101376)


def test_the_engines_own_binaries_come_first(tmp_path: Path) -> None:
    engine = made_up_engine(tmp_path / "e", "sm_80", "sm_90")
    told: list[str] = []
    binaries = binaries_for(engine, device((8, 6)), told.append)
    assert (binaries.arch, binaries.directory, told) == ("sm_80", engine.path, [])


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [
        ((9, 0), "NVIDIA H200", "h200"),
        ((9, 0), "NVIDIA H100 80GB HBM3", "h100"),
        ((8, 0), "NVIDIA A100-SXM4-80GB", "a100"),
        ((8, 6), "NVIDIA RTX A6000", "a100"),
        ((12, 0), "NVIDIA B300", "h200"),
        ((7, 5), "Tesla T4", "h200"),
    ],
)
def test_each_gpu_gets_the_program_that_was_made_for_it(
    tmp_path: Path, capability: tuple[int, int], name: str, expected: str
) -> None:
    engine = made_up_engine(tmp_path / "e", "sm_90", a100=("sm_80",), h200=("sm_90",))
    chosen = program_for(engine.programs, device(capability, name)).target
    assert chosen == expected or (expected == "h200" and name != "NVIDIA H200" and chosen == "h100")


def test_the_cache_key_follows_sources_and_specializations(tmp_path: Path) -> None:
    engine = made_up_engine(tmp_path / "e", "sm_90")
    key = cache_key(engine, engine.program, "sm_120")
    same = made_up_engine(tmp_path / "same")
    assert key == cache_key(same, same.program, "sm_120"), "binaries must not matter"
    assert key != cache_key(engine, engine.program, "sm_121")
    other = made_up_engine(tmp_path / "other", "sm_90", source="other\n")
    assert key != cache_key(other, other.program, "sm_120")
    (launch,) = engine.program.launches
    doubled = replace(engine.program, launches=(launch, launch))
    assert key != cache_key(engine, doubled, "sm_120"), "the same sources in another program"


def test_what_none_fits_is_compiled_once_and_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    engine = made_up_engine(tmp_path / "e", "sm_90", source=SOURCE)
    told: list[str] = []
    first = binaries_for(engine, device((12, 0)), told.append)
    assert told == ["the engine carries kernels for sm_90; compiling its 1 kernels for sm_120, once"]
    (compiled,) = first.program.launched_kernels()
    assert set(compiled.binaries) == {first.arch} == {"sm_120"}
    assert (first.directory / compiled.binaries["sm_120"].file).read_bytes().startswith(b"\x7fELF")
    assert list(first.directory.parent.iterdir()) == [first.directory], "nothing unfinished is left"
    monkeypatch.setattr(device_binaries, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert binaries_for(engine, device((12, 0)), told.append) == first
    assert len(told) == 1
    settings.cache_clear()


def test_what_cannot_be_compiled_is_a_target_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    engine = made_up_engine(tmp_path / "e", "sm_90")
    told: list[str] = []
    with pytest.raises(TargetError, match="cannot be compiled for sm_120") as caught:
        binaries_for(engine, device((12, 0)), told.append)
    assert told == ["the engine carries kernels for sm_90; compiling its 1 kernels for sm_120, once"]
    assert "llmc build" in str(caught.value.fix)
    monkeypatch.setattr(device_binaries, "installed_version", lambda package: None)
    with pytest.raises(TargetError, match="triton, which could compile them, is not installed"):
        binaries_for(engine, device((12, 1)), told.append)
    settings.cache_clear()
