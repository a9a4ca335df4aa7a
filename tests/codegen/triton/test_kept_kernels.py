"""A kernel is compiled once, and again when anything of what it is made from changes, or what was kept is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.cache import CacheKind, open_cache
from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kept_kernels import find_kernel, keep_kernel, kernel_entry
from llmc.codegen.triton.kernels.rows.rms_norm import rms_norm
from llmc.settings import settings
from tests.codegen.triton.offline_compile import meta, node_kernels
from tests.gpu_target import gpu_target


def test_what_is_kept_needs_no_process(workers: Workers, tmp_path: Path) -> None:
    kernel, *_ = node_kernels(rms_norm, (meta(2, 64), meta(64), 1e-5), gpu_target("h100"))
    (tmp_path / "first" / "kernels").mkdir(parents=True)
    (tmp_path / "again" / "kernels").mkdir(parents=True)
    first = workers.compile(kernel, gpu_target("h100"), tmp_path / "first")
    with Workers(1) as others:
        again = others.compile(kernel, gpu_target("h100"), tmp_path / "again")
        assert not others._processes
    assert again.binary == first.binary
    for name in (first.assembly.relative_to(tmp_path / "first"), Path(first.binary.file)):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.fixture
def request_of(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "kernel.py").write_text("a kernel")
    return {"source": str(tmp_path / "kernel.py"), "output": str(tmp_path / "out"), "constants": {"BLOCK": 8}}


def test_every_part_counts(request_of: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "same.py").write_text("a kernel")
    (tmp_path / "other.py").write_text("another kernel")
    entry = kernel_entry(request_of)
    assert kernel_entry({**request_of, "source": str(tmp_path / "same.py"), "output": "elsewhere"}) == entry
    others = [kernel_entry({**request_of, "constants": {"BLOCK": 16}})]
    others.append(kernel_entry({**request_of, "source": str(tmp_path / "other.py")}))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    others.append(kernel_entry(request_of))
    assert len({entry, *others}) == 4


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.usefixtures("empty_cache")
def test_what_is_damaged_is_not_found(request_of: dict[str, Any], tmp_path: Path) -> None:
    binary, assembly = tmp_path / "made.sm_90.cubin", tmp_path / "made.sm_90.ptx"
    binary.write_bytes(bytes(range(256)))
    assembly.write_text("assembly")
    entry, output = kernel_entry(request_of), str(tmp_path / "found.sm_90")
    assert find_kernel(entry, output) is None
    keep_kernel(entry, {"registers": 3, "assembly": str(assembly)}, binary)
    assert find_kernel(entry, output) == {"registers": 3, "assembly": f"{output}.ptx"}
    assert Path(f"{output}.cubin").read_bytes() == binary.read_bytes()
    path = open_cache(CacheKind.GPU_KERNELS).path / entry
    path.write_text(path.read_text().replace('"registers": 3', '"registers": 4'))
    assert find_kernel(entry, output) is None
