"""External data of an ONNX file: the files that a location may refer to, and their bytes.

A model from anywhere must not read what its directory does not hold. So a location is a relative path without `..`;
what it leads to, links followed, lies in the model's own directory (or, of a snapshot in the hub's cache, among that
repository's files); and it has one name only, since a hard link looks like any file (CVE-2026-27489, CVE-2026-34446 and
CVE-2026-34447 of the onnx package).
"""

import os
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath

from llmc.errors import CheckpointError, EngineFormatError
from llmc.files.hub_model import repository_of
from llmc.files.regular_file import open_regular

_DOWNLOAD_AGAIN = "download the model again, with all files of its directory"


@dataclass(frozen=True)
class ExternalBytes:
    """The place of a tensor in an external data file. start: its first byte."""

    file: Path
    start: int
    nbytes: int

    def read(self) -> bytearray:
        """Return a copy of the data. Raises CheckpointError for a file that has changed."""
        # Read, not mapped: truncating the file meanwhile is an error here, and does not kill the process.
        content = bytearray(self.nbytes)
        with _opened(self.file) as stream:
            stream.seek(self.start)
            if stream.readinto(content) != self.nbytes:
                raise CheckpointError("the file became shorter", at=self.file, fix=_DOWNLOAD_AGAIN)
        return content


def external_bytes(model: Path, tensor: str, entries: dict[str, str], nbytes: int) -> ExternalBytes:
    """The location of a tensor of `nbytes` bytes from its external_data entries. model: the ONNX file.

    Raises CheckpointError for a place outside the model's directory, and for one that is not wholly there.
    """
    location = entries.get("location", "")
    file = _inside(model, tensor, location)
    start, length = (_number(model, tensor, key, entries.get(key)) for key in ("offset", "length"))
    if length is not None and length != nbytes:
        raise CheckpointError(
            f"tensor {tensor!r:.80} has {length} bytes in {location!r:.80}, where its shape and type take {nbytes}",
            at=model,
            fix=_DOWNLOAD_AGAIN,
        )
    with _opened(file) as stream:
        status = os.fstat(stream.fileno())
    if status.st_nlink > 1:
        raise CheckpointError(
            f"the external data file {location!r:.80} has {status.st_nlink} names (hard links), so that it may belong "
            "to another user",
            at=file,
            fix="copy it: cp FILE COPY && mv COPY FILE",
        )
    end = (start or 0) + nbytes
    if end > status.st_size:
        raise CheckpointError(
            f"tensor {tensor!r:.80} ends at byte {end} of {location!r:.80}, which has {status.st_size}",
            at=model,
            fix=_DOWNLOAD_AGAIN,
        )
    return ExternalBytes(file, start or 0, nbytes)


def _inside(model: Path, tensor: str, location: str) -> Path:
    parts = PurePosixPath(location).parts
    absolute = PurePosixPath(location).is_absolute() or bool(PureWindowsPath(location).anchor)
    outside = CheckpointError(
        f"tensor {tensor!r:.80} lies at {location!r:.120}, which is not a file in the model's directory",
        at=model,
        fix="external data must be in the directory of the .onnx file, under a relative name",
    )
    if not location or not location.isprintable() or absolute or ".." in parts or "\\" in location:
        raise outside
    folder = model.parent
    try:
        file = (folder / location).resolve()
        roots = [folder.resolve()]
    except (OSError, RuntimeError, ValueError):  # e.g. a link to itself
        raise outside from None
    # The hub's cache keeps each file once, among the blobs, and links to it from the snapshot.
    if repository_of(folder) is not None:
        roots.append(folder.resolve().parents[1] / "blobs")
    if not any(file.is_relative_to(root) for root in roots):
        raise outside
    return file


def _opened(file: Path) -> BufferedReader:
    try:
        return open_regular(file)
    except EngineFormatError as error:
        raise CheckpointError(str(error.problem), at=file, fix=_DOWNLOAD_AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"cannot read it: {error.strerror}", at=file, fix=_DOWNLOAD_AGAIN) from None


def _number(model: Path, tensor: str, key: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise CheckpointError(
            f"tensor {tensor!r:.80} has the {key} {text!r:.40}, which is not a number of bytes",
            at=model,
            fix=_DOWNLOAD_AGAIN,
        )
    return int(text)
