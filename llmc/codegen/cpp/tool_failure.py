"""The error for a failed compiler: the missing package or full disk, or else the compiler's first errors."""

import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from llmc.errors import LlmcError, ToolchainError
from llmc.files.storage_error import ELSEWHERE_CACHED, NO_ROOM, storage_error

INSTALL = "install one: apt install g++ (or dnf install gcc-c++), or set CXX; or build with --target reference"
_SHOWN_LINES = 8
# Where less is free, a failure that no line of the source explains is put down to it.
_LEAST_BYTES = 64 << 20

_NO_PROGRAM = re.compile(
    r"cannot execute '([^']+)'"  # gcc
    r"|error trying to exec '([^']+)'"
    r"|cannot find '([^']+)'"  # collect2
    r"|Executable \"([^\"]+)\" doesn't exist"  # clang
    r"|unable to execute command: .*?([\w.+-]+): No such file"
)
_NO_HEADER = re.compile(r"fatal error: '?([\w/]+(?:\.h)?)'?(?:: No such file or directory| file not found)")
_NO_LIBRARY = re.compile(r"cannot find (-l\S+|crt\w+\.o)")
_UNKNOWN_FLAG = re.compile(r"(?:unrecognized command[- ]line option|unknown argument:?|bad value) '([^']+)'")
_KILLED = re.compile(r"(?:Killed|Terminated) signal terminated program|command failed due to signal")
_OF_SOURCE = re.compile(r":\d+: (?:fatal )?error")
_FULL = re.compile("|".join(re.escape(os.strerror(number)) for number in NO_ROOM) + "|File size limit exceeded")
# The names of the tools' packages: Debian's, and Fedora's if it differs.
_PACKAGES = {"as": "binutils", "ld": "binutils", "ar": "binutils", "collect2": "gcc", "cc1plus": "g++"}


def tool_failure(command: Sequence[str], done: CompletedProcess[str], *, source: Path, scratch: Path) -> LlmcError:
    """The error of a command that failed.

    Args:
        command: with its arguments.
        done: what it has written and how it ended.
        source: what it was to read.
        scratch: where it keeps its temporary files.
    """
    tool, output = Path(command[0]).name, f"{done.stderr}\n{done.stdout}".strip()
    if _FULL.search(output) or -done.returncode == signal.SIGXFSZ:
        return _full(tool, output, scratch)
    missing = _missing(tool, output)
    if missing is not None:
        problem, fix = missing
        return ToolchainError(problem, at=command[0], fix=fix)
    if _OF_SOURCE.search(output) is None and _is_full(scratch):
        return _full(tool, output, scratch)
    if _KILLED.search(output) or done.returncode < 0:
        problem, fix = f"{tool} was killed, which happens where memory runs out", "free memory, and build again"
        return ToolchainError(problem, at=source, fix=fix)
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    shown = "\n    ".join(lines[first : first + _SHOWN_LINES]) or f"exit status {done.returncode}, no message"
    return ToolchainError(f"{tool} failed:\n    {shown}", at=source, fix=f"the command was: {shlex.join(command)}")


def _full(tool: str, output: str, scratch: Path) -> LlmcError:
    number = next((number for number in NO_ROOM if os.strerror(number) in output), NO_ROOM[0])
    error = OSError(number, os.strerror(number))
    return storage_error(error, scratch, content=f"what {tool} writes", elsewhere=ELSEWHERE_CACHED)


def _is_full(scratch: Path) -> bool:
    """Return whether the disk is full. Some tools do not say so, or crash when they read a file that was cut off."""
    try:
        status = os.statvfs(scratch)
    except OSError:
        return False
    no_names = status.f_files > 0 and status.f_favail == 0
    return no_names or shutil.disk_usage(scratch).free < _LEAST_BYTES


def _missing(tool: str, output: str) -> tuple[str, str] | None:
    """The problem, and what to install."""
    program = _NO_PROGRAM.search(output)
    if program is not None:
        name = Path(next(filter(None, program.groups()))).name
        package = _PACKAGES.get(name, "g++ binutils")
        return f"{tool} cannot run {name}, which is missing", f"install it: apt install {package}"
    header = _NO_HEADER.search(output)
    if header is not None:
        return f"{tool} has no <{header[1]}>: headers of C++ or of the system are missing", INSTALL
    library = _NO_LIBRARY.search(output)
    if library is not None:
        return f"{tool} cannot link: it has no {library[1]}", INSTALL
    flag = _UNKNOWN_FLAG.search(output)
    if flag is not None:
        fix = "install a newer one and set CXX to it, or build for an older target: llmc targets"
        return f"{tool} does not know {flag[1]}, which the target needs", fix
    return None
