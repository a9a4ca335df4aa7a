"""The compiler: found, asked at once whether it can compile at all, and its failures told in our words."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import llmc
from llmc.codegen.cpp.tool_failure import tool_failure
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.codegen.cpp.toolchain_check import check_toolchain
from llmc.errors import EngineFormatError, LlmcError, ToolchainError
from llmc.targets import host_target


def test_no_compiler_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler found: looked for c\+\+, g\+\+, clang\+\+") as caught:
        find_toolchain({"PATH": str(tmp_path)})
    assert "apt install g++" in str(caught.value) and "--target reference" in str(caught.value)
    with pytest.raises(ToolchainError, match=r"looked for no-such-compiler \(from CXX\)"):
        find_toolchain({"PATH": str(tmp_path), "CXX": "no-such-compiler"})


def test_cxx_may_hold_arguments() -> None:
    toolchain = find_toolchain()
    chosen = find_toolchain({"PATH": "/usr/bin:/bin", "CXX": f"{toolchain.compiler[0]} -O1"})
    assert chosen.compiler == (toolchain.compiler[0], "-O1")


def test_a_failed_command_shows_its_first_error_and_the_source(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main() { return missing; }\n", encoding="utf-8")
    with pytest.raises(ToolchainError, match=r"error: .*missing") as caught:
        run_tool(
            [*find_toolchain().compiler, "-c", source, "-o", tmp_path / "broken.o"], source=source, scratch=tmp_path
        )
    assert caught.value.at == str(source) and source.is_file()


def test_a_full_disk_is_named_as_what_to_change(tmp_path: Path) -> None:
    source = tmp_path / "fine.cpp"
    source.write_text("int value = 1;\n", encoding="utf-8")
    with pytest.raises(
        EngineFormatError, match=r"no room for what .* writes \(No space left on device\): \d+"
    ) as caught:
        run_tool([*find_toolchain().compiler, "-S", source, "-o", "/dev/full"], source=source, scratch=tmp_path)
    assert "LLMC_CACHE_DIR" in str(caught.value.fix) and caught.value.at == str(tmp_path)


def test_a_compiler_that_a_limit_on_files_kills_is_told_as_a_full_disk(tmp_path: Path) -> None:
    source = tmp_path / "fine.cpp"
    source.write_text("char big[1 << 20] = {1};\n", encoding="utf-8")
    limited = ["sh", "-c", 'ulimit -f 16; exec "$0" "$@"', *find_toolchain().compiler]
    with pytest.raises(EngineFormatError, match="no room for what sh writes"):
        run_tool([*limited, "-c", source, "-o", tmp_path / "fine.o"], source=source, scratch=tmp_path)


def path_with(folder: Path, *tools: str) -> Path:
    """A directory for PATH that has these tools of the system alone."""
    folder.mkdir()
    for tool in tools:
        place = shutil.which(tool)
        assert place is not None
        (folder / tool).symlink_to(Path(place).resolve())
    return folder


@pytest.mark.parametrize(
    ("tools", "problem", "fix"),
    [
        ((), r"no C\+\+ compiler found", "apt install g++"),
        (("g++",), "no archiver found", "apt install binutils"),
        (("g++", "ar"), r"g\+\+ cannot run as, which is missing", "apt install binutils"),
        (("g++", "ar", "as"), r"g\+\+ cannot run ld, which is missing", "apt install binutils"),
    ],
)
def test_what_is_missing_is_named_before_a_model_is_looked_at(
    tools: tuple[str, ...], problem: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("gcc looks for its assembler in PATH; other compilers have one built in")
    monkeypatch.setenv("PATH", str(path_with(tmp_path / "bin", *tools)))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=problem) as caught:
        llmc.build(tmp_path / "no-such-model", tmp_path / "engine.llmc", target="cpu")
    assert fix in str(caught.value.fix)
    assert not (tmp_path / "engine.llmc").exists()


def test_a_compiler_that_does_not_know_the_target_is_named_at_once(tmp_path: Path) -> None:
    newer = replace(host_target(), compiler_flags=("-mno-such-instructions",))
    with pytest.raises(ToolchainError, match="does not know -mno-such-instructions, which the target needs"):
        check_toolchain(newer, ())


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("fatal error: cstdint: No such file or directory", "has no <cstdint>"),
        ("fatal error: 'atomic' file not found", "has no <atomic>"),
        ("/usr/bin/ld: cannot find -lstdc++: No such file", "cannot link: it has no -lstdc++"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "was killed, which happens where memory"),
        ("c++: error trying to exec 'cc1plus': execvp: No such file or directory", "cannot run cc1plus"),
        ('clang: error: unable to execute command: Executable "ld" doesn\'t exist!', "cannot run ld"),
        ("x.s: Assembler messages:\nx.s: Fatal error: can't close x.o: Disk quota exceeded", "no room for what c++"),
    ],
)
def test_what_compilers_say_of_what_is_missing(said: str, problem: str, tmp_path: Path) -> None:
    done = subprocess.CompletedProcess(["c++"], 1, stdout="", stderr=said)
    error = tool_failure(["c++"], done, source=tmp_path / "x.cpp", scratch=tmp_path)
    assert problem in error.problem and error.fix


@pytest.mark.parametrize("compiler", ["'", "/dev/null", "{file}"])
def test_a_cxx_that_is_no_command_is_named(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c++"
    file.write_bytes(b"\x7fELF but not quite")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", compiler.format(file=file))
    with pytest.raises(LlmcError, match=r"CXX|cannot be run"):
        find_toolchain()
