"""Blocks in files, one for each, which may outlive the process.

A file has a header that identifies the block: format, engine, key, length, and a checksum of all that and of the block.
It appears under its name when it is whole, and nothing of it is believed before the checksum is. So a process may be
killed at any moment, and a disk may fill: what is left is a block, or is seen to be none.
"""

import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from llmc.files.file_lock import try_lock
from llmc.files.scratch_directory import ScratchDirectory
from llmc.runtime.kv_tier.block_store import BlockKey, DamagedBlockError, checksum
from llmc.runtime.memory import Bytes

# In the identity of engines too, so that another format is another directory.
FORMAT = 1
_MAGIC = b"llmcKV\x00" + bytes([FORMAT])
# Magic, identity of the engine, name of the block and its length, group, bytes of the block, checksum.
_HEADER = struct.Struct("<8s32s32sIIQ16s")
_CHECKSUM_BYTES = 16
_NAME = re.compile(r"(?P<name>(?:[0-9a-f]{2}){1,32})-(?P<group>\d{1,4})\.kv")
_UNFINISHED = ".part"
_log = logging.getLogger("llmc.engine")


class BlockFiles:
    """A BlockStore in its own directory, which it locks.

    Args:
        identity: the identity of the engine and of all else that decides what a block's bytes mean.
        scratch: what the directory lies in, if it goes with this object.

    Raises:
        OSError: the directory cannot be made. BlockingIOError: another process has it.
    """

    overhead = _HEADER.size

    def __init__(self, directory: Path, identity: bytes, scratch: ScratchDirectory | None = None) -> None:
        self._scratch, self.outlives = scratch, scratch is None
        self._directory, self._identity, self.place = directory, identity, str(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = try_lock(directory)
        if self._lock is None:
            raise BlockingIOError(f"{directory} is locked")

    def write(self, key: BlockKey, content: Bytes) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(_UNFINISHED)
        head = self._head(key, content.nbytes)
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                _write_all(descriptor, head + checksum(head, content.data))
                _write_all(descriptor, content.data)
            finally:
                os.close(descriptor)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, key: BlockKey, nbytes: int) -> Bytes:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise DamagedBlockError("its file is missing") from None
        try:
            size = os.fstat(descriptor).st_size
            if size != _HEADER.size + nbytes:
                raise DamagedBlockError(f"its file has {size} bytes in place of {_HEADER.size + nbytes}")
            head, content = os.read(descriptor, _HEADER.size), np.empty(nbytes, np.uint8)
            done = 0
            while done < nbytes and (count := os.readv(descriptor, [content.data[done:]])):
                done += count
        finally:
            os.close(descriptor)
        expected = self._head(key, nbytes)
        if head[:-_CHECKSUM_BYTES] != expected:
            raise DamagedBlockError("its file is another engine's or another block's")
        if done < nbytes or head[-_CHECKSUM_BYTES:] != checksum(expected, content.data):
            raise DamagedBlockError("its file's bytes have changed: they do not have the checksum in its header")
        return content

    def remove(self, key: BlockKey) -> None:
        self._path(key).unlink(missing_ok=True)

    def found(self) -> Iterator[tuple[BlockKey, int]]:
        """Yield the kept prefixes. Swapped-out blocks of requests and unfinished files are removed; foreign files
        stay."""
        left: list[tuple[int, BlockKey, int]] = []
        for entry in os.scandir(self._directory):
            match = _NAME.fullmatch(entry.name)
            if match is None and not entry.name.endswith(_UNFINISHED):
                _log.warning("the second tier ignores %s, which is not one of its blocks", entry.path)
                continue
            with suppress(OSError):
                key = None if match is None else BlockKey(int(match["group"]), bytes.fromhex(match["name"]))
                if key is None or not key.is_prefix:
                    Path(entry.path).unlink()
                else:
                    status = entry.stat(follow_symlinks=False)
                    left.append((status.st_mtime_ns, key, status.st_size - _HEADER.size))
        left.sort()
        return ((key, nbytes) for _, key, nbytes in left)

    def touch(self, key: BlockKey) -> None:
        """Record the use in the file's time, which gives the order after a restart."""
        os.utime(self._path(key))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._scratch is not None:
            self._scratch.cleanup()

    def _path(self, key: BlockKey) -> Path:
        return self._directory / f"{key.name.hex()}-{key.group}.kv"

    def _head(self, key: BlockKey, nbytes: int) -> bytes:
        """The header without its checksum."""
        fields = (_MAGIC, self._identity, key.name, len(key.name), key.group, nbytes, b"")
        return _HEADER.pack(*fields)[:-_CHECKSUM_BYTES]


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
