"""The kernel cache: built once, shared by concurrent builders, and never used when broken; toolchain errors."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.codegen.cpp import kernel_library
from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import compile_flags, kernel_archive
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.errors import OptionError, ToolchainError
from llmc.targets import CPU_TARGETS, CpuTarget

TARGET = CPU_TARGETS[-1]
TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = small_library(tmp_path)
    monkeypatch.setattr(kernel_library, "kernel_include_dir", lambda: folder)
    return folder


def small_library(beside: Path) -> Path:
    """The sources of a library that takes a fraction of a second to build."""
    folder = beside / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(TINY, encoding="utf-8")
    # Every library says how it lays out the structs of this header.
    shutil.copy(kernel_include_dir() / "api.h", folder)
    return folder


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "kernels").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("target", CPU_TARGETS, ids=lambda t: t.name)
def test_kernels_compile_without_a_warning(target: CpuTarget, tmp_path: Path) -> None:
    if target.machine not in (None, platform.machine()):
        pytest.skip(f"flags for {target.machine}")
    for source in sorted(kernel_include_dir().glob("*.cpp")):
        command = [*find_toolchain().compiler, *compile_flags(target), "-Werror", "-c", str(source)]
        run_tool([*command, "-o", str(tmp_path / "kernel.o")], source=source, scratch=tmp_path)


def test_a_second_call_compiles_nothing(sources: Path, tmp_path: Path) -> None:
    archive = kernel_archive(TARGET, tmp_path)
    written = archive.stat().st_mtime_ns
    assert archive.with_suffix(".so").is_file()
    assert kernel_archive(TARGET, tmp_path).stat().st_mtime_ns == written
    assert entries(tmp_path) == [archive.parent.name]


def test_a_changed_source_or_flag_is_another_entry(sources: Path, tmp_path: Path) -> None:
    first = kernel_archive(TARGET, tmp_path)
    assert kernel_archive(CPU_TARGETS[-2], tmp_path) != first
    (sources / "answer.cpp").write_text(TINY + "// changed\n", encoding="utf-8")
    assert kernel_archive(TARGET, tmp_path) != first


@pytest.mark.parametrize("damage", ["truncate", "remove", "no hashes"])
def test_a_broken_entry_is_built_again(sources: Path, tmp_path: Path, damage: str) -> None:
    library = kernel_archive(TARGET, tmp_path).with_suffix(".so")
    whole = library.read_bytes()
    if damage == "truncate":
        library.write_bytes(whole[: len(whole) // 2])
    elif damage == "remove":
        library.unlink()
    else:
        (library.parent / "sha256.json").write_text("{", encoding="utf-8")
    kernel_archive(TARGET, tmp_path)
    assert library.read_bytes()[:4] == whole[:4]
    assert len(library.read_bytes()) == len(whole)
    assert entries(tmp_path) == [library.parent.name]


def test_an_interrupted_build_leaves_nothing_that_is_used(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text("this is not C++\n", encoding="utf-8")
    with pytest.raises(ToolchainError, match=r"error: .*this"):
        kernel_archive(TARGET, tmp_path)
    assert entries(tmp_path) == []


def test_of_concurrent_builders_one_compiles(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llmc.codegen.cpp import kernel_library as k\n"
        "from llmc.targets import CPU_TARGETS\n"
        "k.kernel_include_dir = lambda: Path(sys.argv[1])\n"
        "print(k.kernel_archive(CPU_TARGETS[-1], Path(sys.argv[2])))"
    )
    sources = small_library(tmp_path)
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {find_toolchain().compiler[0]} "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    command = [sys.executable, "-c", code, str(sources), str(tmp_path)]
    environ = {**os.environ, "CXX": str(compiler)}
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(4)]
    results = {builder.communicate(timeout=60)[0] for builder in builders}
    assert all(builder.returncode == 0 for builder in builders)
    assert len(results) == 1 and Path(results.pop().strip()).is_file()
    assert len(entries(tmp_path)) == 1
    assert sum("answer.cpp" in line for line in log.read_text(encoding="utf-8").splitlines()) == 1


def test_a_cache_that_cannot_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    with pytest.raises(OptionError, match="cannot create the cache: File exists") as caught:
        kernel_archive(TARGET, blocked)
    assert "LLMC_CACHE_DIR" in str(caught.value)


def test_a_killed_builder_leaves_nothing_outside_the_cache_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    """What the compiler keeps of its work for itself stands where the next builder of any kernels removes it."""
    sources, cache, temporary = small_library(tmp_path), tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    told, compiler = tmp_path / "told", tmp_path / "compiler"
    os.mkfifo(told)
    real = find_toolchain().compiler[0]
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n'
        f'mktemp "${{TMPDIR:-/tmp}}/ccXXXXXX.s" > {told}\nexec sleep 600\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from llmc.codegen.cpp import kernel_library as k\n"
        "from llmc.targets import CPU_TARGETS\n"
        "k.kernel_include_dir = lambda: Path(sys.argv[1])\n"
        "k.kernel_archive(CPU_TARGETS[-1], Path(sys.argv[2]))"
    )
    environ = {**os.environ, "CXX": str(compiler), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code, str(sources), str(cache)]
    builder = subprocess.Popen(command, env=environ, start_new_session=True)
    left = Path(told.read_text(encoding="utf-8").splitlines()[0])
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    os.killpg(builder.pid, signal.SIGKILL)  # The compiler does not know that nobody waits for it.
    assert left.is_file() and left.is_relative_to(cache)
    assert list(temporary.iterdir()) == []
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not left.exists() and list(temporary.iterdir()) == []
    assert len(entries(cache)) == 1
    (entry,) = (cache / "kernels").iterdir()
    assert {file.name for file in entry.iterdir()} == {"libllmc_kernels.a", "libllmc_kernels.so", "sha256.json"}
