"""Kernels that are compiled while a build goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.codegen.cpp.background import BackgroundCompiler
from llmc.options import BuildOptions
from llmc.settings import settings
from llmc.targets import host_target


def test_kernels_go_to_the_cache_that_the_build_began_with(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that has failed may be over, and another cache named, before the compiler says its version."""
    gate, compiler = tmp_path / "gate", tmp_path / "c++"
    os.mkfifo(gate)
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && cat {gate}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("LLMC_CACHE_DIR", str(first))
    settings.cache_clear()
    with BackgroundCompiler(host_target(), BuildOptions()):
        monkeypatch.setenv("LLMC_CACHE_DIR", str(second))
        settings.cache_clear()
        gate.write_text("some version\n")
    assert (first / "kernels").is_dir() and not second.exists()
