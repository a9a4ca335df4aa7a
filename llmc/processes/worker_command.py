"""How llmc starts other Python processes: what they import, and what they may know."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Variables that Python and the libraries of workers may need: search paths, locale and time zone. No others are passed
# on, such as keys, tokens or proxies with passwords.
_HARMLESS = frozenset(
    {
        "HOME",  # Where packages lie that a user has installed for himself.
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONUSERBASE",
        "RAYON_NUM_THREADS",
        "TMPDIR",
        "TZ",
        "VIRTUAL_ENV",
    }
)


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command of `python -m module arguments` that imports nothing from the current directory (-P).

    Start it with `worker_environment`, so that it finds the llmc that this process runs.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def worker_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with a PYTHONPATH on which its llmc is, and which names no current directory."""
    environ = os.environ if environ is None else environ
    return {**environ, "PYTHONPATH": _import_path(environ)}


def minimal_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that a process needs to start, for one that runs untrusted code; see `worker_environment`."""
    environ = os.environ if environ is None else environ
    kept = {name: value for name, value in environ.items() if name in _HARMLESS or name.startswith("LC_")}
    return {**kept, "PYTHONPATH": _import_path(environ)}


def _import_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH without the current directory, which empty parts mean too, and with the folder that llmc is in.

    That folder is last: a source tree whose llmc was found through the current directory would not be found otherwise.
    """
    entries = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part) != Path()]
    own = Path(__file__).resolve().parents[2]
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(own.parts)
    return os.pathsep.join(entries if is_installed or str(own) in entries else [*entries, str(own)])
