"""Every LLMC_* environment variable, typed, read once."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from llmc.errors import OptionError

# Variables that `llmc bisect` sets for the command that it runs, which may be an llmc command.
BISECT_PREFIX = "LLMC_BISECT_"


class CaptureCache(Enum):
    """The processes that keep captured graphs and find them again. Values are those of LLMC_CAPTURE_CACHE.

    OFF: none. CLEAN: those that have not imported transformers, whose classes may be patched after an import. ALWAYS:
    all.
    """

    OFF = "0"
    CLEAN = "1"
    ALWAYS = "always"


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    Attributes:
        cache_dir: Directory of engines built from models, compiled kernels and captured graphs (LLMC_CACHE_DIR).
        debug: Whether errors have tracebacks (LLMC_DEBUG=1).
        threads: Threads of a CPU engine; None is one per available processor (LLMC_THREADS).
        dump: Directory to which the graph after every pass is written as text; None for none (LLMC_DUMP).
        api_key: Key of `llmc serve`, and of llmc's clients of a server (LLMC_API_KEY).
        capture_cache: The processes that keep captured graphs (LLMC_CAPTURE_CACHE).
        cache_bytes: Limit of the cache's size (LLMC_CACHE_SIZE, such as 20GB); None is the default of
            llmc/cache/contents.py.
        rank_start_seconds: Time limit for all ranks of an engine to start (LLMC_RANK_START_SECONDS).
        rank_stall_seconds: Longest time that a rank may keep the others waiting in a step (LLMC_RANK_STALL_SECONDS).
        ptx_instructions: Instructions of a block after which executor="ptx" reports an endless kernel
            (LLMC_PTX_INSTRUCTIONS).
        rank_devices: The GPU of each rank of an engine of several, as torch numbers them (LLMC_RANK_DEVICES, such as
            0,0); None is the GPU of the rank's number.
        run_ahead: Whether a GPU's next step is queued before the last step's tokens are read (LLMC_RUN_AHEAD=1).
        prompt_graphs: Whether a GPU runs small steps with prompts as graphs (LLMC_PROMPT_GRAPHS=1).
    """

    cache_dir: Path
    debug: bool
    threads: int | None
    dump: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    capture_cache: CaptureCache = CaptureCache.CLEAN
    cache_bytes: int | None = None
    rank_start_seconds: float = 120.0
    rank_stall_seconds: float = 30.0
    ptx_instructions: int = 10_000_000
    rank_devices: tuple[int, ...] | None = None
    run_ahead: bool = False
    prompt_graphs: bool = False


@cache
def settings() -> Settings:
    """The settings of this process."""
    return read_settings(os.environ)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Parse the LLMC_* variables; an unknown one or a bad value is an OptionError. Empty counts as unset."""
    known = {
        "LLMC_API_KEY",
        "LLMC_CACHE_DIR",
        "LLMC_CACHE_SIZE",
        "LLMC_CAPTURE_CACHE",
        "LLMC_DEBUG",
        "LLMC_DUMP",
        "LLMC_PROMPT_GRAPHS",
        "LLMC_PTX_INSTRUCTIONS",
        "LLMC_RANK_DEVICES",
        "LLMC_RANK_STALL_SECONDS",
        "LLMC_RANK_START_SECONDS",
        "LLMC_RUN_AHEAD",
        "LLMC_THREADS",
    }
    for name in environ:
        if name.startswith("LLMC_") and name not in known and not name.startswith(BISECT_PREFIX):
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known variables: {', '.join(sorted(known))}"
            raise OptionError(f"unknown environment variable {name}", at=f"{name}={environ[name]}", fix=hint)
    threads = environ.get("LLMC_THREADS", "")
    if threads and not (threads.isascii() and threads.isdigit() and 1 <= int(threads) <= 1024):
        fix = "give a whole number from 1 to 1024, or unset it for one thread per processor"
        raise _cannot_be("LLMC_THREADS", threads, fix)
    switches = dict.fromkeys(("LLMC_DEBUG", "LLMC_RUN_AHEAD", "LLMC_PROMPT_GRAPHS"), "")
    for name, more in (switches | {"LLMC_CAPTURE_CACHE": CaptureCache.ALWAYS.value}).items():
        value = environ.get(name, "")
        if value not in ("", "0", "1", more):
            raise _cannot_be(name, value, f"set it to 0, 1 or {more}" if more else "set it to 0 or 1")
    dump = environ.get("LLMC_DUMP", "")
    return Settings(
        _cache_dir(environ),
        environ.get("LLMC_DEBUG") == "1",
        int(threads) if threads else None,
        Path(dump).expanduser() if dump else None,
        environ.get("LLMC_API_KEY") or None,
        CaptureCache(environ.get("LLMC_CAPTURE_CACHE") or CaptureCache.CLEAN.value),
        _cache_bytes(environ.get("LLMC_CACHE_SIZE", "")),
        _seconds(environ, "LLMC_RANK_START_SECONDS", Settings.rank_start_seconds),
        _seconds(environ, "LLMC_RANK_STALL_SECONDS", Settings.rank_stall_seconds),
        _instructions(environ),
        _devices(environ.get("LLMC_RANK_DEVICES", "")),
        environ.get("LLMC_RUN_AHEAD") == "1",
        environ.get("LLMC_PROMPT_GRAPHS") == "1",
    )


def _cannot_be(name: str, value: str, fix: str) -> OptionError:
    return OptionError(f"{name} cannot be {value!r}", at=f"{name}={value}", fix=fix)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII) is None or not float(text):
        raise _cannot_be(name, text, f"give seconds, or unset it for {default:g}")
    return float(text)


def _instructions(environ: Mapping[str, str]) -> int:
    text = environ.get("LLMC_PTX_INSTRUCTIONS", "")
    if not text:
        return Settings.ptx_instructions
    if re.fullmatch(r"[1-9][0-9]{0,14}", text, re.ASCII) is None:
        raise _cannot_be("LLMC_PTX_INSTRUCTIONS", text, f"give a number, or unset it for {Settings.ptx_instructions}")
    return int(text)


def _devices(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text, re.ASCII) is None:
        raise _cannot_be("LLMC_RANK_DEVICES", text, "give a GPU for each rank, such as 0,1,0,1")
    return tuple(map(int, text.split(",")))


def _cache_dir(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("LLMC_CACHE_DIR", "")
    if chosen:
        return Path(chosen).expanduser()
    home = environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "llmc"


def _cache_bytes(size: str) -> int | None:
    """A size such as 20GB, 500 MiB or 1000000 in bytes; None for an empty one."""
    if not size:
        return None
    nbytes = size_in_bytes(size)
    if nbytes is None:
        raise _cannot_be("LLMC_CACHE_SIZE", size, "give a size such as 20GB or 500MB, or unset it")
    return nbytes


def size_in_bytes(text: str) -> int | None:
    """Bytes of a size such as 20GB, 500 MiB or 1000000; None for another text."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]i?B?|B)?", text, re.IGNORECASE | re.ASCII)
    if match is None:
        return None
    unit = (match[2] or "B").upper()
    thousand: int = 1024 if "I" in unit else 1000
    return int(match[1]) * int(thousand ** "BKMGT".index(unit[0]))
