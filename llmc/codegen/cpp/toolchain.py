"""Find the C++ compiler and archiver, and run them with errors that a user can act on."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.codegen.cpp.tool_failure import INSTALL, tool_failure
from llmc.errors import ToolchainError


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler (command and arguments that always go with it), its version line, and an archiver."""

    compiler: tuple[str, ...]
    version: str
    archiver: str


def find_toolchain(environ: Mapping[str, str] | None = None) -> Toolchain:
    """The compiler is $CXX or the first of c++, g++, clang++; the archiver is $AR, ar or llvm-ar. Reads os.environ.

    Raises ToolchainError with the names that were searched and the package to install.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PATH", "")
    try:
        chosen = shlex.split(environ.get("CXX", ""))
    except ValueError as error:
        raise ToolchainError(f"CXX is not a command: {error}", at=f"CXX={environ['CXX']}", fix=INSTALL) from None
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        executable = shutil.which(command[0], path=path)
        if executable is not None:
            compiler = (executable, *command[1:])
            return Toolchain(compiler, _version(compiler), _archiver(environ, path))
    looked = " ".join(chosen) + " (from CXX)" if chosen else ", ".join(c[0] for c in candidates)
    raise ToolchainError(f"no C++ compiler found: looked for {looked}", at=f"PATH={path}", fix=INSTALL)


def run_tool(command: Sequence[str | Path], *, source: Path, scratch: Path) -> None:
    """Run a compiler or archiver.

    Args:
        command: with its arguments.
        source: what it reads, for the error.
        scratch: a directory for its temporary files.

    Raises:
        LlmcError: what is missing or full, or the first errors that the tool names.
    """
    # Its messages are searched for missing parts, so they must be in English.
    environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    done = _output([str(part) for part in command], environment)
    if done.returncode != 0:
        raise tool_failure([str(part) for part in command], done, source=source, scratch=scratch)


def _output(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error.strerror}", at=command[0], fix=INSTALL) from None


def _version(compiler: tuple[str, ...]) -> str:
    done = _output([*compiler, "--version"], os.environ)
    if done.returncode != 0 or not done.stdout:
        raise ToolchainError(f"{' '.join(compiler)} --version failed: {done.stderr.strip()[:200]}", fix=INSTALL)
    return done.stdout.splitlines()[0]


def _archiver(environ: Mapping[str, str], path: str) -> str:
    for name in (environ.get("AR", ""), "ar", "gcc-ar", "llvm-ar"):
        executable = shutil.which(name, path=path) if name else None
        if executable is not None:
            return executable
    raise ToolchainError(
        "no archiver found: looked for ar, gcc-ar, llvm-ar", at=f"PATH={path}", fix="apt install binutils"
    )
