"""Hashes of a file in chunks, so that a file is hashed while it is written and checked by several threads at once.

There are two kinds. SHA-256 identifies an engine's content, because collisions cannot be constructed. XXH3 finds
accidental damage at the speed of memory, so it can run while an engine starts: SHA-256 takes 0.7 s for a gigabyte on
one core, XXH3 0.04 s (Zen 4).
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash

from llmc.engine_format.manifest import FileRecord
from llmc.errors import EngineFormatError

CHUNK_BYTES = 64 << 20
HashKind = Literal["SHA-256", "XXH3"]
_HASHES: Mapping[HashKind, Callable[[memoryview], Any]] = {"SHA-256": hashlib.sha256, "XXH3": xxhash.xxh3_64}


class ChunkDigest:
    def __init__(self) -> None:
        self._sha256, self._xxh3 = hashlib.sha256(), xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the chunk."""
        self._sha256.update(data)
        self._xxh3.update(data)

    def hexdigests(self) -> tuple[str, str]:
        """SHA-256 and XXH3."""
        return self._sha256.hexdigest(), self._xxh3.hexdigest()


class ChunkHasher:
    """Digests of consecutive chunks of CHUNK_BYTES of the bytes that `update` receives. An empty file has no chunk."""

    def __init__(self) -> None:
        self._bytes = 0
        self._chunks: list[ChunkDigest] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file."""
        for chunk, piece in self.pieces(data):
            chunk.update(piece)

    def pieces(self, data: memoryview) -> list[tuple[ChunkDigest, memoryview]]:
        """The next bytes, piece by piece, each with the digest of its chunk, which is still to be updated with it.

        Use all of them before `pieces` is called again; different chunks' in any order or at once.
        """
        digested = []
        while data:
            filled = self._bytes % CHUNK_BYTES
            if not filled:
                self._chunks.append(ChunkDigest())
            piece, data = data[: CHUNK_BYTES - filled], data[CHUNK_BYTES - filled :]
            digested.append((self._chunks[-1], piece))
            self._bytes += len(piece)
        return digested

    def record(self) -> FileRecord:
        """Size and digests of all bytes; no more may be added afterwards."""
        digests = [chunk.hexdigests() for chunk in self._chunks]
        return FileRecord(self._bytes, tuple(s for s, _ in digests), tuple(x for _, x in digests))


def check_sha256(content: memoryview, record: FileRecord, at: Path) -> None:
    """Raise EngineFormatError for the first chunk of a file's content that has another SHA-256 than its record says."""
    for index, digest in enumerate(record.sha256):
        check_chunk("SHA-256", content, index, digest, at)


def check_chunk(kind: HashKind, content: memoryview, index: int, digest: str, at: Path) -> None:
    """Raise EngineFormatError if a chunk of a file's content has another hash than `digest`."""
    begin = index * CHUNK_BYTES
    actual = _HASHES[kind](content[begin : begin + CHUNK_BYTES]).hexdigest()
    if actual != digest:
        raise EngineFormatError(
            f"the file is corrupt: bytes from {begin} on have {kind} {actual[:16]}…, the manifest says {digest[:16]}…",
            at=at,
            fix="copy the engine again, or rebuild it: llmc build MODEL -o ENGINE",
        )
