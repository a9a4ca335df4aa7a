"""Codes lie in a file of the cache directory; a disk that is full, or read-only, is the user's to know."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from llmc.errors import EngineFormatError, OptionError
from llmc.passes.quantization import file_backed as module
from llmc.passes.quantization.file_backed import file_backed
from llmc.settings import read_settings

_LARGE = torch.arange(1 << 20, dtype=torch.int32).view(1 << 10, 1 << 10)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that is not there yet."""
    directory = tmp_path / "cache"
    monkeypatch.setattr(module, "settings", lambda: read_settings({"LLMC_CACHE_DIR": str(directory)}))
    return directory


def test_keeps_the_tensor_and_leaves_no_file(cache: Path) -> None:
    assert torch.equal(file_backed(_LARGE), _LARGE)
    assert list(cache.iterdir()) == []


def test_small_tensors_stay_in_memory(cache: Path) -> None:
    assert torch.equal(file_backed(_LARGE[:4]), _LARGE[:4])
    assert not cache.exists()


def test_says_that_the_disk_is_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineFormatError, match="no room for the quantized weights") as caught:
        file_backed(_LARGE)
    assert "4194304 bytes are needed, " in caught.value.problem
    assert caught.value.at == str(cache)
    assert "set LLMC_CACHE_DIR to a directory on another disk" in str(caught.value.fix)


def test_says_that_the_directory_cannot_be_made(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(OptionError, match="cannot create the cache: File exists") as caught:
        file_backed(_LARGE)
    assert caught.value.at == str(cache) and "LLMC_CACHE_DIR" in str(caught.value.fix)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_says_that_writing_is_forbidden(cache: Path) -> None:
    cache.mkdir(mode=0o500)
    with pytest.raises(EngineFormatError, match="cannot write the quantized weights: Permission denied"):
        file_backed(_LARGE)
