"""Read numbers and texts from a file that may be damaged: nothing is taken, or made room for, beyond its end."""

import struct
from io import BufferedReader
from pathlib import Path

from llmc.errors import CheckpointError

DOWNLOAD_AGAIN = "download the file again"
_LONGEST_TEXT = 1 << 24


class ByteReader:
    """Reads numbers and texts from a stream, from its beginning. size: Size of the file in bytes. All methods raise
    CheckpointError."""

    def __init__(self, stream: BufferedReader, size: int, path: Path) -> None:
        self._stream, self._size, self._path = stream, size, path
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return self._size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.error(f"truncated: {what} takes {count} bytes, but only {self.left} of {self._size} are left")
        content = self._stream.read(count)
        if len(content) < count:
            raise self.error(f"the file became shorter while it was read: {what} ends after {len(content)} bytes")
        self.position += count
        return content

    def number(self, form: str, what: str) -> int | float | bool:
        """Read one little-endian number. form: Its format character of `struct`. what: Its name in errors."""
        value: int | float | bool = struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]
        return value

    def count(self, what: str, least: int, *, form: str = "Q") -> int:
        """Read a count of items. least: The minimum bytes per item; the count must fit the rest of the file."""
        number = int(self.number(form, what))
        if number * least > self.left:
            raise self.error(
                f"{what} is {number}, which would take at least {number * least} bytes; {self.left} are left"
            )
        return number

    def text(self, what: str) -> str:
        """Read a text: its length, then its UTF-8 bytes."""
        length = self.count(f"the length of {what}", 1)
        if length > _LONGEST_TEXT:
            raise self.error(f"{what} has {length} bytes, more than the {_LONGEST_TEXT} that are read of a text")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"damaged GGUF file: {problem}", at=self._path, fix=DOWNLOAD_AGAIN)
