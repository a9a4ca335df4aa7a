"""Blocks in the host's memory, for engines whose cache lies on a device."""

from collections.abc import Iterator

from llmc.runtime.kv_tier.block_store import BlockKey, DamagedBlockError, checksum
from llmc.runtime.memory import Bytes


class HostBlocks:
    """A BlockStore. A block is never changed, so a reader keeps it even if it is removed meanwhile."""

    place = "the host's memory"
    overhead = 16
    outlives = False

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, tuple[Bytes, bytes]] = {}

    def write(self, key: BlockKey, content: Bytes) -> None:
        own = content.copy()
        self._blocks[key] = own, checksum(own.data)

    def read(self, key: BlockKey, nbytes: int) -> Bytes:
        entry = self._blocks.get(key)
        if entry is None:
            raise DamagedBlockError("it is missing")
        content, expected = entry
        if content.nbytes != nbytes or checksum(content.data) != expected:
            raise DamagedBlockError("its bytes have changed in memory")
        return content

    def remove(self, key: BlockKey) -> None:
        self._blocks.pop(key, None)

    def found(self) -> Iterator[tuple[BlockKey, int]]:
        """Yield nothing, because no block outlives a process."""
        return iter(())

    def touch(self, key: BlockKey) -> None:
        """Do nothing: blocks do not outlive the process, so their order is not kept."""

    def close(self) -> None:
        self._blocks.clear()
