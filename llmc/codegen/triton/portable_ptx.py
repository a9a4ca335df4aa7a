"""PTX as engines keep it: the instructions and their line table, without this machine's paths.

The line table keeps `.file` and `.loc`, and the functions' names that `.loc` refers to. The other sections repeat them
for debuggers and hold paths as bytes. Files have the engine's names: a kernel's file has its own name, and Triton's
files have paths from the package on. The same kernel gives the same text on every machine, and ptxas accepts it.
"""

import re
from pathlib import Path

_KEPT_SECTION = ".debug_str"
_SECTION = re.compile(r"^\t\.section\t(\S+)\s*\{[^}]*\}\n", re.MULTILINE)
_FILE = re.compile(r'^(\t\.file\t\d+ )"([^"]*)"$', re.MULTILINE)
# Nothing refers to these labels once the other sections are gone; comments say again what `.loc` says.
_TEMPORARY_LABEL = re.compile(r"^\$L__tmp\d+:\n", re.MULTILINE)
_LOCATION_COMMENT = re.compile(r"^(\t\.loc\t[^/\n]*?) *//.*$", re.MULTILINE)


def portable_ptx(text: str, packages: Path) -> str:
    """The PTX that Triton compiled with line information, for an engine. packages: the folder that Triton is in."""
    text = _SECTION.sub(lambda match: match[0] if match[1] == _KEPT_SECTION else "", text)
    text = _FILE.sub(lambda match: f'{match[1]}"{_portable_path(Path(match[2]), packages)}"', text)
    return _LOCATION_COMMENT.sub(r"\1", _TEMPORARY_LABEL.sub("", text))


def _portable_path(path: Path, packages: Path) -> str:
    return path.relative_to(packages).as_posix() if path.is_relative_to(packages) else path.name
