"""SHA-256 of a file in chunks, so that a file is hashed while it is written and checked by several threads at once."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmc.engine_format.manifest import FileRecord
from llmc.errors import EngineFormatError
from llmc.mapped_file import Bytes, mapped_file

CHUNK_BYTES = 64 << 20


class ChunkHasher:
    """Digests of consecutive CHUNK_BYTES of what `update` is given. An empty file has no chunk."""

    def __init__(self) -> None:
        self._bytes = 0
        self._chunks: list[hashlib._Hash] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file."""
        for chunk, piece in self.pieces(data):
            chunk.update(piece)

    def pieces(self, data: memoryview) -> list[tuple[hashlib._Hash, memoryview]]:
        """The next bytes, piece by piece, each with the digest of its chunk, which is still to be updated with it.

        All of them before `pieces` is asked again; different chunks' in any order or at once.
        """
        found = []
        while data:
            filled = self._bytes % CHUNK_BYTES
            if not filled:
                self._chunks.append(hashlib.sha256())
            piece, data = data[: CHUNK_BYTES - filled], data[CHUNK_BYTES - filled :]
            found.append((self._chunks[-1], piece))
            self._bytes += len(piece)
        return found

    def record(self) -> FileRecord:
        """Size and digests of all bytes so far; nothing may follow."""
        return FileRecord(self._bytes, tuple(chunk.hexdigest() for chunk in self._chunks))


def check_hashes(files: dict[Path, FileRecord], threads: int) -> None:
    """Raise EngineFormatError for the first file whose bytes are not those of its record; sizes must fit already."""
    chunks = [(path, i, digest) for path, record in files.items() for i, digest in enumerate(record.sha256)]
    mapped = {path: mapped_file(path) for path, _, _ in chunks}
    with ThreadPoolExecutor(threads) as pool:
        seen = list(pool.map(lambda chunk: _chunk_digest(mapped[chunk[0]], chunk[1]), chunks))
    for (path, index, digest), found in zip(chunks, seen, strict=True):
        if found != digest:
            raise EngineFormatError(
                f"the file is corrupt: bytes from {index * CHUNK_BYTES} on have SHA-256 {found[:16]}…, "
                f"the manifest says {digest[:16]}…",
                at=path,
                fix="copy the engine again, or rebuild it with `llmc build`",
            )


def _chunk_digest(content: Bytes, index: int) -> str:
    return hashlib.sha256(content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].data).hexdigest()
