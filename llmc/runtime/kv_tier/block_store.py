"""Stores of the second tier: the host's memory (host_blocks.py) or files (block_files.py)."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import xxhash

from llmc.runtime.memory import Bytes

_DIGEST_BYTES = 32


class BlockKey(NamedTuple):
    """The name of a block's content.

    group: the number of the group of caches. name: the digest of a block of tokens (prefix_cache/block_digests.py), 32
    bytes, or a shorter number, for a block that a single request has swapped out.
    """

    group: int
    name: bytes

    @property
    def is_prefix(self) -> bool:
        """Whether other requests, and other processes, may find the block."""
        return len(self.name) == _DIGEST_BYTES


class DamagedBlockError(Exception):
    """Raised for a stored block whose content is not what was kept under its key. The message names the difference."""


class BlockStore(Protocol):
    """Keeps the bytes of blocks by key. One thread writes and removes, another reads."""

    @property
    def place(self) -> str:
        """The store's location, as text."""

    @property
    def outlives(self) -> bool:
        """Whether another process may find the blocks."""

    @property
    def overhead(self) -> int:
        """Bytes that a block takes in addition to its own."""

    def write(self, key: BlockKey, content: Bytes) -> None:
        """Keep a copy. Raises OSError."""

    def read(self, key: BlockKey, nbytes: int) -> Bytes:
        """The block's bytes. Raises DamagedBlockError if they have changed, OSError if they cannot be read."""

    def remove(self, key: BlockKey) -> None:
        """Delete a block; a missing one is ignored. Raises OSError."""

    def found(self) -> Iterator[tuple[BlockKey, int]]:
        """The blocks that an earlier process has left, and their bytes, the one used longest ago first."""

    def touch(self, key: BlockKey) -> None:
        """Record that the block was used now. Raises OSError."""

    def close(self) -> None:
        """Stop all reads and writes."""


def checksum(*parts: bytes | memoryview) -> bytes:
    """XXH3 of 128 bits, which finds any accidental damage."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
