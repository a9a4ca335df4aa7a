"""Find the C++ compiler and archiver, and run them with errors that a user can act on."""

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import ToolchainError

_INSTALL = "install one: apt install g++ (or dnf install gcc-c++), or set CXX; or build with --target reference"


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler (command and arguments that always go with it), its version line, and an archiver."""

    compiler: tuple[str, ...]
    version: str
    archiver: str


def find_toolchain(environ: Mapping[str, str] | None = None) -> Toolchain:
    """The compiler is $CXX or the first of c++, g++, clang++; the archiver is $AR, ar or llvm-ar. Reads os.environ.

    Raises ToolchainError with what was looked for and what to install.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PATH", "")
    chosen = shlex.split(environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        executable = shutil.which(command[0], path=path)
        if executable is not None:
            compiler = (executable, *command[1:])
            return Toolchain(compiler, _version(compiler), _archiver(environ, path))
    looked = " ".join(chosen) + " (from CXX)" if chosen else ", ".join(c[0] for c in candidates)
    raise ToolchainError(f"no C++ compiler found: looked for {looked}", at=f"PATH={path}", fix=_INSTALL)


def run_tool(command: Sequence[str | Path], *, source: Path) -> None:
    """Run a compiler or archiver on `source`; a failure is a ToolchainError with its first error lines."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    output = done.stderr or done.stdout
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    shown = "\n    ".join(lines[first : first + 8]) or f"exit status {done.returncode}, no message"
    no_room = any(os.strerror(number) in output for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    room = "free some space, or set LLMC_CACHE_DIR and TMPDIR to folders on another disk; " if no_room else ""
    raise ToolchainError(
        f"{Path(command[0]).name} failed:\n    {shown}",
        at=source,
        fix=f"{room}the command was: {shlex.join(str(part) for part in command)}",
    )


def _version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not done.stdout:
        raise ToolchainError(f"{' '.join(compiler)} --version failed: {done.stderr.strip()[:200]}", fix=_INSTALL)
    return done.stdout.splitlines()[0]


def _archiver(environ: Mapping[str, str], path: str) -> str:
    for name in (environ.get("AR", ""), "ar", "gcc-ar", "llvm-ar"):
        executable = shutil.which(name, path=path) if name else None
        if executable is not None:
            return executable
    raise ToolchainError(
        "no archiver found: looked for ar, gcc-ar, llvm-ar", at=f"PATH={path}", fix="apt install binutils"
    )
