"""A digest of llmc's own sources, for keys of caches that depend on them."""

from functools import cache
from hashlib import sha256
from pathlib import Path

_SUFFIXES = {".py", ".h", ".cpp"}


@cache
def source_digest(rooms: tuple[str, ...]) -> str:
    """Hexadecimal SHA-256 of the package's top-level modules and of all sources in the folders `rooms`.

    Read once: what a process has imported stays, even if the files change.
    """
    package = Path(__file__).parent.parent
    digest = sha256()
    paths = [*package.glob("*.py"), *(path for room in rooms for path in (package / room).rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in _SUFFIXES):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
