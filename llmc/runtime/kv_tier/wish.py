"""The user's options for the second tier, checked without an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.engine_format.manifest import is_engine
from llmc.engine_format.path_argument import path_argument
from llmc.errors import OptionError, bad_value
from llmc.settings import size_in_bytes


@dataclass(frozen=True)
class OffloadingWish:
    """The requested second tier. size: bytes. directory: where blocks stay for the next process; None for where nothing
    stays. given: the size as the user wrote it."""

    size: int
    directory: Path | None
    given: int | str


def offloading_wish(size: Any, directory: Any, *, prefix_cache: bool = True) -> OffloadingWish | None:
    """Return the requested second tier; None if there is none. Raises OptionError for bad or contradictory options."""
    place = None if directory is None else path_argument("kv_offloading_dir", directory)
    if size is None:
        if place is not None:
            raise OptionError(
                "a directory for the second tier was given, and no size",
                at=f"kv_offloading_dir={str(place)!r}",
                fix="set its size as well: kv_offloading_size='20GB'",
            )
        return None
    nbytes = size_in_bytes(size) if isinstance(size, str) else size
    if type(nbytes) is not int or nbytes < 1:
        raise bad_value("kv_offloading_size", size, "give a size such as 20GB or 500MiB, or a whole number of bytes")
    if place is None:
        return OffloadingWish(nbytes, None, size)
    if not prefix_cache:
        raise OptionError(
            "without the prefix cache no block is kept for the next process",
            at=f"kv_offloading_dir={str(place)!r}",
            fix="leave out kv_offloading_dir, or let prefixes be found (prefix_cache=True)",
        )
    if is_engine(place):
        raise OptionError(
            "the directory for the second tier is an engine",
            at=f"kv_offloading_dir={str(place)!r}",
            fix="name a directory that nothing else uses",
        )
    return OffloadingWish(nbytes, place, size)
