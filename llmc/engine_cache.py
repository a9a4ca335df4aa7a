"""Engines of model directories, built once and found again by what they were built from.

The key covers everything that could change the engine's bytes: the model's files, the target as resolved on this
machine, the options, and llmc's own code. What is found is never stale; what is not needed any more may be deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import llmc
from llmc.engine_format.manifest import is_engine
from llmc.errors import CheckpointError, OptionError
from llmc.options import BuildKeywords, parse_options
from llmc.settings import settings
from llmc.source_digest import source_digest
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.compiler import Progress

_READ_BYTES = 8 << 20
_BUILDING_ROOMS = ("graph", "ops", "passes", "codegen", "engine_format")
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt"}


def find_or_build_engine(
    model: str | Path, *, target: str = "cpu", progress: Progress | None = None, **options: Unpack[BuildKeywords]
) -> Path:
    """The engine directory for a model directory: from LLMC_CACHE_DIR/engines if it was built before, else built now.

    Arguments as in llmc.build. A second process that wants the same engine waits for the first. Raises LlmcError.
    """
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            "this is neither an engine nor a model directory: it has no manifest.json and no config.json",
            at=directory,
            fix="give an engine that llmc build has written, or a Hugging Face directory",
        )
    root = settings().cache_dir / "engines"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"the engine cache cannot be made: {error.strerror}", at=root, fix="set LLMC_CACHE_DIR to another place"
        ) from None
    path = root / f"{directory.resolve().name}-{engine_key(directory, target, options)[:20]}.llmc"
    with _locked(path.with_suffix(".lock")):
        if not is_engine(path):
            from llmc.compiler import build  # Here because it imports torch, which a found engine does without.

            build(directory, path, target=target, progress=progress, **options)
    return path


def engine_key(model: Path, target: str, options: Mapping[str, object]) -> str:
    """Hexadecimal SHA-256 of all that the engine is made from."""
    files = sorted(p for p in model.iterdir() if p.is_file() and p.suffix in _MODEL_SUFFIXES)
    parsed = parse_options(options)
    calibration = None if parsed.calibration is None else Path(parsed.calibration)
    parts = {
        "llmc": [llmc.__version__, source_digest(_BUILDING_ROOMS)],
        "model": {file.name: _remembered_digest(file) for file in files},
        "target": json.loads(json.dumps(asdict(resolve_target(target)), default=str, sort_keys=True)),
        "options": parsed.model_dump(mode="json"),
        # A file that is not there is for the build to refuse.
        "calibration": _remembered_digest(calibration) if calibration is not None and calibration.is_file() else None,
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _remembered_digest(file: Path) -> str:
    """A file's digest. Reading gigabytes takes seconds, so it is kept beside the engines until the file changes."""
    status = file.stat()
    identity = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ino}\n{status.st_dev}"
    memo = settings().cache_dir / "digests" / sha256(identity.encode()).hexdigest()
    if memo.is_file() and len(found := memo.read_text(encoding="ascii")) == 64:
        return found
    digest = sha256()
    with file.open("rb") as data:
        while piece := data.read(_READ_BYTES):
            digest.update(piece)
    memo.parent.mkdir(parents=True, exist_ok=True)
    temporary = memo.with_suffix(f".{os.getpid()}")
    temporary.write_text(digest.hexdigest(), encoding="ascii")
    temporary.replace(memo)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
