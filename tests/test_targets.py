"""Targets by name: one, several GPUs at once, the device that is there, and unknown ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import llmc.targets
from llmc.errors import TargetError
from llmc.runtime.device.binaries import fitting_arch
from llmc.targets import (
    GPU_TARGETS,
    GpuTarget,
    device_target,
    host_features,
    host_target,
    is_gpu_target,
    match_device,
    resolve_target,
)


def test_every_gpu_is_found_by_its_name() -> None:
    for target in GPU_TARGETS:
        assert resolve_target(target.name) is target
        assert is_gpu_target(target.name)
        assert target.compiled == (target,)


@pytest.mark.parametrize(
    "target", [target for target in GPU_TARGETS if target.backend == "cuda"], ids=lambda each: each.name
)
def test_the_summary_says_what_predictions_reckon_with(target: GpuTarget) -> None:
    match = re.search(r"\(sm_(\d+)\), (\d+) GB at ([\d.]+) (TB|GB)/s$", target.summary)
    assert match is not None, target.summary
    arch, memory, rate, unit = match.groups()
    assert (int(arch), int(memory) * 10**9) == (target.arch, target.memory_bytes)
    assert float(rate) * {"TB": 1e12, "GB": 1e9}[unit] == pytest.approx(target.bandwidth, rel=0.01)


def test_several_gpus_share_the_least_of_what_they_have() -> None:
    both = resolve_target("h100, a100")
    assert isinstance(both, GpuTarget)
    assert both.name == "h100,a100" and is_gpu_target(both.name)
    assert [target.name for target in both.compiled] == ["h100", "a100"]
    a100 = resolve_target("a100")
    assert isinstance(a100, GpuTarget)
    assert (both.arch, both.has_tma, both.shared_memory_per_block) == (80, False, a100.shared_memory_per_block)


def test_only_the_table_asks_of_what_kind_a_target_is() -> None:
    targets = Path(llmc.targets.__file__).parent
    asks = re.compile(r"isinstance\(.*\b(Cpu|Gpu|Onnx|Reference)Target\b")
    package = targets.parent
    folders = {path.parent for path in package.rglob("*.py") if asks.search(path.read_text(encoding="utf-8"))}
    assert folders == {targets}


@pytest.mark.parametrize("names", ["h100,cpu-portable", "h100,mi300x", "h100,reference"])
def test_what_cannot_share_an_engine(names: str) -> None:
    with pytest.raises(TargetError, match="cannot share an engine"):
        resolve_target(names)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TargetError, match=r"did you mean 'h100'.*h200.*mi300x"):
        resolve_target("h10")


@pytest.mark.parametrize(
    ("name", "capability", "is_hip", "found"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), False, "h100"),
        ("NVIDIA H200", (9, 0), False, "h200"),
        ("NVIDIA GeForce RTX 4090", (8, 9), False, "rtx4090"),
        ("NVIDIA L40S", (8, 9), False, "l40s"),
        ("NVIDIA L4", (8, 9), False, "l4"),
        ("NVIDIA L40", (8, 9), False, "l40"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), False, "a100"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), False, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", (8, 0), False, "a100-40gb"),
        ("NVIDIA H100 PCIe", (9, 0), False, "h100-pcie"),
        ("NVIDIA H100 NVL", (9, 0), False, "h100-nvl"),
        ("NVIDIA GH200 480GB", (9, 0), False, "gh200"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), False, "l4"),
        ("AMD Instinct MI300X", (9, 4), True, "mi300x"),
        ("NVIDIA A10", (8, 6), False, "a10"),
        ("NVIDIA GeForce RTX 3090", (8, 6), False, "rtx3090"),
        ("NVIDIA RTX A1000", (8, 6), False, "a10"),
        ("AMD Instinct MI250X", (9, 0), True, None),
        ("NVIDIA T4", (7, 5), False, None),
        ("NVIDIA GeForce RTX 5090", (12, 0), False, None),
    ],
)
def test_a_device_has_its_target(name: str, capability: tuple[int, int], is_hip: bool, found: str | None) -> None:
    target = match_device(name, capability, is_hip=is_hip)
    assert (None if target is None else target.name) == found


@dataclass(frozen=True)
class Properties:
    """Of what torch tells about a device, what is asked for."""

    name: str


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Let torch report one CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize("name", ["NVIDIA A10", "NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000"])
def test_auto_takes_a_target_that_runs_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100's kernels are machine code for 8.0, which 8.6 runs, but may ask for more shared memory than it has."""
    pretend(monkeypatch, name, (8, 6))
    target = resolve_target("auto")
    assert isinstance(target, GpuTarget)
    assert fitting_arch([target.arch_name], (8, 6)) is not None
    assert target.shared_memory_per_block <= 99 * 1024


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("NVIDIA GeForce RTX 5090", (12, 0))])
def test_auto_does_not_pass_over_a_device_that_no_target_fits(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, capability)
    with pytest.raises(TargetError, match=rf"{name} \(sm_{capability[0]}{capability[1]}\)") as caught:
        resolve_target("auto")
    assert "target=cpu" in str(caught.value.fix)
    assert device_target() is None


def test_auto_is_the_cpu_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_target("auto") == host_target()


@pytest.mark.parametrize(("cuda", "problem"), [("13.0", "is built for CUDA 13.0"), (None, "is built without CUDA")])
def test_auto_does_not_pass_over_a_gpu_that_torch_cannot_use(
    cuda: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02\nGCC version: 12\n")
    monkeypatch.setattr(llmc.targets.here, "_NVIDIA_DRIVER", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(TargetError, match=rf"470\.57\.02\), but torch .* {problem}") as caught:
        resolve_target("auto")
    assert "target=cpu" in str(caught.value.fix)


def test_amx_counts_only_where_the_system_saves_its_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmc.targets.here, "_has_tiles", lambda: True)
    with_tiles = host_features()
    monkeypatch.setattr(llmc.targets.here, "_has_tiles", lambda: False)
    assert host_features() == {flag for flag in with_tiles if not flag.startswith("amx_")}
