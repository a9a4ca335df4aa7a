"""Write an engine directory: file by file under a temporary name, the manifest last, then one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmc.engine_format.chunk_hash import ChunkHasher
from llmc.engine_format.engine_files import EngineFiles
from llmc.engine_format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    check_file_name,
    is_engine,
    manifest_text,
    read_manifest,
)
from llmc.engine_format.weight_file import header, plan_shards
from llmc.errors import EngineFormatError
from llmc.files.atomic_directory import AtomicDirectory
from llmc.files.mapped_file import HUGE_PAGE_BYTES
from llmc.files.regular_file import open_regular
from llmc.files.storage_error import storage_error
from llmc.files.typed_json import to_json
from llmc.processes.processors import usable_processors
from llmc.program import WeightSlot

if TYPE_CHECKING:
    from torch import Tensor

    PackedWeight = bytes | memoryview | npt.NDArray[np.generic] | Tensor

_COPY_BYTES = 4 << 20
# Number of hashing threads, and the size in bytes below which they are not used.
_MOST_THREADS = 4
_LEAST_SHARED_BYTES = 1 << 20
# Files other than weights are small. A build that leaves less than this free would fail at the next file.
_HEADROOM_BYTES = 1 << 20


class EngineWriter:
    """Context manager; `finish` makes the engine appear at `destination`, leaving without it leaves nothing.

    An existing engine at the destination is replaced at that moment. Any other non-empty directory is an
    EngineFormatError, and so is a full disk.
    """

    def __init__(self, destination: Path) -> None:
        self._directory = AtomicDirectory(destination, is_engine)
        self._folder = ""
        self._files: dict[str, FileRecord] = {}
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, usable_processors()))

    @property
    def path(self) -> Path:
        """The temporary directory, for tools that write files themselves; `add_file` then records each."""
        return self._directory.path / self._folder

    def below(self, folder: str) -> EngineWriter:
        """Writes the same engine's files, into a folder that ends in a slash."""
        other = copy(self)
        other._folder = self._folder + folder
        return other

    @property
    def root(self) -> EngineWriter:
        """Writes the same engine's files, at paths from its root."""
        other = copy(self)
        other._folder = ""
        return other

    @property
    def files(self) -> EngineFiles:
        """The files of the engine written until now."""
        return EngineFiles(self._directory.path, dict(self._files))

    def __enter__(self) -> EngineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._directory.__exit__(kind, error, trace)

    def write_text(self, name: str, text: str) -> None:
        """A UTF-8 file. name: relative to the engine, with forward slashes."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """A file of a dataclass, or of plain data with such in it."""
        self.write_text(name, json.dumps(to_json(value), indent=1, ensure_ascii=False) + "\n")

    def write_bytes(self, name: str, data: bytes) -> None:
        """A file of these bytes."""
        with _HashedFile(self._new_path(name), len(data), self._pool) as file:
            file.write(memoryview(data))
        self._files[self._folder + name] = file.record()

    def copy_file(self, name: str, source: Path) -> None:
        try:
            content = open_regular(source)
        except OSError as error:
            raise EngineFormatError(
                f"cannot read a file that belongs into the engine: {error.strerror}",
                at=source,
                fix="check that the file exists and may be read",
            ) from None
        with content, _HashedFile(self._new_path(name), os.fstat(content.fileno()).st_size, self._pool) as file:
            while piece := content.read(_COPY_BYTES):
                file.write(memoryview(piece))
        self._files[self._folder + name] = file.record()

    def add_file(self, name: str) -> None:
        """Record a file that was written into `path` by other means, such as a linker."""
        check_file_name(name, self.path)
        hasher = ChunkHasher()
        with (self.path / name).open("rb") as content:
            while piece := content.read(_COPY_BYTES):
                hasher.update(memoryview(piece))
        self._files[self._folder + name] = hasher.record()

    def add_engine(self, folder: str) -> None:
        """Record all files of a finished engine that was written into a folder of `path`."""
        manifest = read_manifest(self.path / folder)
        for name, record in manifest.files.items():
            self._files[f"{self._folder}{folder}/{name}"] = record
        self.add_file(f"{folder}/{MANIFEST_NAME}")

    def write_weights(
        self,
        weights: Sequence[tuple[WeightSlot, Callable[[], PackedWeight]]],
        *,
        rank: int = 0,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Stream the weights into weights/rank{rank}-*.safetensors.

        Each callable gives the tensor packed in the slot's layout (slot.nbytes bytes: a buffer, an array or a torch
        tensor on the CPU), is called once, in order, and its result is dropped before the next. progress: told the
        bytes of each tensor written. Raises EngineFormatError before writing anything if the disk has no room.
        """
        self._check_room(sum(slot.nbytes for slot, _ in weights))
        makers = iter(weights)
        for number, slots in enumerate(plan_shards([slot for slot, _ in weights])):
            name = f"weights/rank{rank}-{number:04d}.safetensors"
            head, gaps = header(slots)
            size = len(head) + sum(gaps) + sum(slot.nbytes for slot in slots)
            with _HashedFile(self._new_path(name), size, self._pool) as file:
                file.write(memoryview(head))
                for slot, gap in zip(slots, gaps, strict=True):
                    file.write(memoryview(bytes(gap)))
                    file.write(_packed_bytes(slot, next(makers)[1]()))
                    progress(slot.nbytes)
            self._files[self._folder + name] = file.record()

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest with the record of every file, put all on disk, rename. Returns the manifest written."""
        complete = replace(manifest, files=dict(sorted(self._files.items())))
        text = manifest_text(complete).encode()
        with _HashedFile(self._directory.path / MANIFEST_NAME, len(text), self._pool) as file:
            file.write(memoryview(text))
        self._directory.commit()
        return complete

    def _new_path(self, name: str) -> Path:
        check_file_name(name, self.path)
        if self._folder + name in self._files:
            raise EngineFormatError(f"the file {name!r} is written twice", at=self.path)
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, path) from None
        return path

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed + _HEADROOM_BYTES > free:
            raise EngineFormatError(
                f"there is no room for the weights: {needed + _HEADROOM_BYTES} bytes are needed, {free} are free",
                at=self._directory.destination,
                fix="free some space, or choose an output on another disk",
            )


class _HashedFile:
    """A file that is hashed while it is written; a failing write is an EngineFormatError. size: bytes it will have.

    It is written in whole huge pages, so that the page cache holds it in such: who runs the engine next maps those.
    """

    def __init__(self, path: Path, size: int, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._left = size
        self._pool = pool
        self._hasher = ChunkHasher()
        self._waiting = bytearray()  # for the rest of their page

    def __enter__(self) -> _HashedFile:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise storage_error(error, self._path, self._left) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write(memoryview(self._waiting))
        finally:
            os.close(self._descriptor)

    def write(self, data: memoryview) -> None:
        if len(data) < _LEAST_SHARED_BYTES:
            self._hasher.update(data)
            self._write_pages(data)
            return
        # Hashing takes longer than writing: the chunks of a large weight are hashed side by side meanwhile.
        hashing = [self._pool.submit(chunk.update, piece) for chunk, piece in self._hasher.pieces(data)]
        try:
            self._write_pages(data)
        finally:
            for future in hashing:
                future.result()

    def _write_pages(self, data: memoryview) -> None:
        if self._waiting or len(data) < HUGE_PAGE_BYTES:
            room = HUGE_PAGE_BYTES - len(self._waiting)
            self._waiting += data[:room]
            data = data[room:]
            if len(self._waiting) < HUGE_PAGE_BYTES:
                return
            self._write(memoryview(self._waiting))
            self._waiting = bytearray()
        whole = len(data) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._write(data[:whole])
        self._waiting += data[whole:]

    def _write(self, data: memoryview) -> None:
        try:
            while data:
                written = os.write(self._descriptor, data)
                self._left -= written
                data = data[written:]
        except OSError as error:
            raise storage_error(error, self._path, self._left) from None

    def record(self) -> FileRecord:
        return self._hasher.record()


def _packed_bytes(slot: WeightSlot, packed: PackedWeight) -> memoryview:
    if isinstance(packed, bytes | memoryview):
        data = memoryview(packed).cast("B")
    elif isinstance(packed, np.ndarray):
        data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8).data
    else:
        import torch

        data = packed.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    if data.nbytes != slot.nbytes:
        raise EngineFormatError(
            f"weight {slot.name!r} was packed into {data.nbytes} bytes, its slot has {slot.nbytes}",
            fix="this is a bug in llmc's weight packing: report it with the model's name",
        )
    return data
