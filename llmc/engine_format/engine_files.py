"""The one door to an engine's files: regular files that the manifest lists, of the size and the hash that it says."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from llmc.engine_format.chunk_hash import CHUNK_BYTES, check_sha256
from llmc.engine_format.manifest import MANIFEST_NAME, FileRecord
from llmc.errors import EngineFormatError
from llmc.files.mapped_file import mapped_file
from llmc.files.regular_file import open_regular
from llmc.files.typed_json import REBUILD, from_json

T = TypeVar("T")

WEIGHTS = "weights/"
# Maximum size of a file that is read as a whole; weights are mapped.
_MOST_BYTES = 1 << 30
_COPY_AGAIN = "copy the whole engine again, or rebuild it"
_CHECK = "check the path, its permissions and the disk"


def is_weights(name: str) -> bool:
    """Whether a file holds weights, of the engine or of one that lies in it."""
    return f"/{WEIGHTS}" in f"/{name}"


@dataclass(frozen=True)
class EngineFiles:
    """The files of an engine in the directory `path`, finished or about to be. records: the file records of its
    manifest, by name.

    Readers of an engine ignore all other files in the directory.
    """

    path: Path
    records: Mapping[str, FileRecord]
    # Files that were mapped: who maps one again is to find its pages in place.
    _mapped: dict[str, memoryview] = field(default_factory=dict, compare=False, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.records

    def below(self, folder: str) -> tuple[str, ...]:
        """The names of the files under a folder, sorted."""
        return tuple(sorted(name for name in self.records if name.startswith(f"{folder}/")))

    def read(self, name: str) -> bytes:
        """A file's bytes, checked against its hashes. Raises EngineFormatError."""
        record, path = self._record(name), self.path / name
        if record.bytes > _MOST_BYTES:
            raise EngineFormatError(
                f"the file has {record.bytes} bytes, more than the {_MOST_BYTES} of any such file", at=path, fix=REBUILD
            )
        with self._open(name) as file:
            try:
                content = file.read(record.bytes)
            except OSError as error:
                raise EngineFormatError(f"cannot read it: {error.strerror}", at=path, fix=REBUILD) from None
        check_sha256(memoryview(content), record, path)
        return content

    def text(self, name: str) -> str:
        """A file of UTF-8 text; raises as `read`."""
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise EngineFormatError(f"the file is not text: {error}", at=self.path / name, fix=REBUILD) from None

    def json(self, name: str) -> Any:
        """A file of JSON; raises as `read`."""
        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise EngineFormatError(f"the file is not JSON: {error}", at=self.path / name, fix=REBUILD) from None

    def parsed(self, name: str, kind: type[T]) -> T:
        """The object of type `kind` that from_json makes of a file of JSON. Raises EngineFormatError as `read` does,
        and if the file's fields do not fit the type."""
        return from_json(kind, self.json(name), str(self.path / name))

    def mapped(self, name: str) -> memoryview:
        """A file's bytes as memory, of the right size, the same each time; their hashes are not checked. Raises as
        `read`."""
        if name not in self._mapped:
            with self._open(name) as file:
                is_empty = not self._record(name).bytes
                self._mapped[name] = memoryview(b"") if is_empty else mapped_file(file.fileno())
        return self._mapped[name]

    def check(self, name: str) -> None:
        """Raise EngineFormatError unless the file exists, is regular, and has the recorded size and number of
        hashes."""
        record = self._record(name)
        chunks = -(-record.bytes // CHUNK_BYTES)
        if not len(record.sha256) == len(record.xxh3) == chunks:
            raise EngineFormatError(
                f"{len(record.sha256)} and {len(record.xxh3)} hashes are listed for {name} of {record.bytes} bytes, "
                f"which takes {chunks} each",
                at=self.path / MANIFEST_NAME,
                fix=REBUILD,
            )
        self._open(name).close()

    def _record(self, name: str) -> FileRecord:
        record = self.records.get(name)
        if record is None:
            raise EngineFormatError(f"the manifest lists no {name}", at=self.path / MANIFEST_NAME, fix=REBUILD)
        return record

    def _open(self, name: str) -> BufferedReader:
        """A regular file of the right size, to be read."""
        path, wanted = self.path / name, self._record(name).bytes
        try:
            file = open_regular(path)
        except FileNotFoundError:
            raise EngineFormatError(f"the engine's file {name} is missing", at=path, fix=_COPY_AGAIN) from None
        except OSError as error:
            raise EngineFormatError(f"cannot read the engine: {error.strerror}", at=path, fix=_CHECK) from None
        size = os.fstat(file.fileno()).st_size
        if size != wanted:
            file.close()
            kind = "truncated" if size < wanted else "too long"
            raise EngineFormatError(
                f"the file is {kind}: it has {size} bytes, the manifest says {wanted}", at=path, fix=_COPY_AGAIN
            )
        return file
