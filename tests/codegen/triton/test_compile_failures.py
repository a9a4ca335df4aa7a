"""What a process that compiles for GPUs says where a disk is full, and what is checked before it is started."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import triton

from llmc.codegen.triton.compile import compile_program, require_triton
from llmc.codegen.triton.compile_worker import no_room
from llmc.codegen.triton.lowering import lower_device
from llmc.errors import EngineFormatError, ToolchainError
from llmc.options import BuildOptions
from tests.codegen.tiny_models import gemma2
from tests.gpu_target import gpu_target


def test_a_full_disk_is_known_by_its_number_or_by_a_tools_words() -> None:
    assert no_room(OSError(errno.ENOSPC, "x")) == errno.ENOSPC
    assert no_room(RuntimeError("`ptxas` failed: error: No space left on device")) == errno.ENOSPC
    try:
        try:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        except OSError as behind:
            raise ValueError("at 3:4") from behind
    except ValueError as error:
        assert no_room(error) == errno.EDQUOT
    assert no_room(ValueError("no such name")) is None


def test_a_missing_assembler_is_named_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    require_triton()
    monkeypatch.setattr(type(triton.knobs.nvidia).__dict__["ptxas"], "default_path", "/nowhere/ptxas")
    with pytest.raises(ToolchainError, match="Triton has no assembler for NVIDIA's GPUs") as caught:
        require_triton()
    assert "pip install" in str(caught.value.fix)


@pytest.mark.slow
def test_a_disk_that_takes_no_binary_is_named(tmp_path: Path, own_cache: Path) -> None:
    target = gpu_target("h100")
    lowered = lower_device(gemma2()[0], target, BuildOptions())
    for name, text in lowered.sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    try:
        with pytest.raises(EngineFormatError, match="no room for compiled kernels") as caught:
            compile_program(lowered.program, tmp_path, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "LLMC_CACHE_DIR" in str(caught.value.fix)
