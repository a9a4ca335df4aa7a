"""What compilers wrote into an entry of the cache, with its hashes: it runs only if it is still what they wrote."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

_HASHES = "sha256.json"


def write_hashes(entry: Path, names: Sequence[str]) -> None:
    """Write down what these files of an entry hold."""
    hashes = {name: _sha256(entry / name) for name in names}
    (entry / _HASHES).write_text(json.dumps(hashes), encoding="utf-8")


def has_hashes(entry: Path, names: Sequence[str]) -> bool:
    """Whether these are the files of the entry, and hold what was written down."""
    try:
        hashes = json.loads((entry / _HASHES).read_text(encoding="utf-8"))
        return bool(hashes == {name: _sha256(entry / name) for name in names})
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
