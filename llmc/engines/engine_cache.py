"""A cache of engines of model directories, keyed by everything they were built from.

The key covers everything that could change the engine's bytes: the model's files, the target as resolved on this
machine, the options, llmc's own code and the packages that trace and compile. A cached engine is never stale, and may
be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from llmc.api.version import VERSION
from llmc.cache import CacheKind, open_cache
from llmc.cache.installed_version import installed_version
from llmc.cache.source_digest import source_digest
from llmc.engine_format.manifest import is_engine
from llmc.errors import CheckpointError
from llmc.files.hub_model import model_name
from llmc.files.tokenizer_files import TEMPLATE_FOLDER, name_of
from llmc.options import BuildKeywords, parse_options
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.api.build_stages import Progress

# All that decides what an engine is.
BUILDING_ROOMS = (
    "adapters",
    "api",
    "files",
    "formats",
    "program",
    "targets",
    "graph",
    "frontends",
    "ops",
    "passes",
    "codegen",
    "engine_format",
    "prediction",
)
_BUILDING_PACKAGES = ("torch", "transformers", "triton")
_ONNX, _ONNX_FOLDER = ".onnx", "onnx"
_ONNX_PLACES = (f"*{_ONNX}", f"{_ONNX_FOLDER}/*{_ONNX}")


def find_or_build_engine(
    model: str | Path, *, target: str = "cpu", progress: Progress | None = None, **options: Unpack[BuildKeywords]
) -> Path:
    """The engine directory for a model directory: from LLMC_CACHE_DIR/engines if it was built before, else built now.

    Arguments as in llmc.build. A second process that builds the same engine waits for the first. Raises LlmcError.
    """
    directory = Path(model)
    if not (directory / "config.json").is_file() and not _is_onnx(directory):
        raise CheckpointError(
            "this is neither an engine nor a model directory: it has no manifest.json and no config.json",
            at=directory,
            fix="give an engine, which `llmc build` writes, or a Hugging Face directory",
        )

    def make(path: Path) -> None:
        from llmc.compiler import build  # Here because it imports torch, which a found engine does without.

        build(directory, path, target=target, progress=progress, **options)

    name = f"{model_name(directory)}-{engine_key(directory, target, options)[:20]}.llmc"
    return open_cache(CacheKind.ENGINES).find_or_make(name, is_engine, make)


def engine_key(model: Path, target: str, options: Mapping[str, object]) -> str:
    """Hexadecimal SHA-256 of all that the engine is made from."""
    files = _model_files(model)
    parsed = parse_options(options)
    beside = {"calibration": parsed.calibration, "speculative": parsed.speculative}
    parts = {
        "llmc": [VERSION, source_digest(BUILDING_ROOMS)],
        "model": {name: _remembered_digest(file) for name, file in files.items()},
        "packages": {name: installed_version(name) for name in _BUILDING_PACKAGES},
        "target": asdict(resolve_target(target)),
        "options": parsed.model_dump(mode="json"),
        **{name: None if path is None else _digests(Path(path)) for name, path in beside.items()},
        "lora": [_digests(directory) for directory in parsed.adapters.values()],
    }
    # A set, such as a target's features, has another order in every process.
    return sha256(json.dumps(parts, sort_keys=True, default=sorted).encode()).hexdigest()


def _is_onnx(model: Path) -> bool:
    """Whether it is an ONNX file, or a directory of one."""
    return model.suffix == _ONNX if model.is_file() else any(any(model.glob(place)) for place in _ONNX_PLACES)


def _model_files(model: Path) -> dict[str, Path]:
    """Return all files from which a model may be read: those of its directory, or for an ONNX file also those of the
    directory above it."""
    if not _is_onnx(model):
        files = [*sorted(model.iterdir()), *sorted((model / TEMPLATE_FOLDER).glob("*.jinja"))]
        return {name_of(p): p for p in files if p.is_file()}
    folder = model.parent if model.is_file() else model
    around = folder.parent if folder.name == _ONNX_FOLDER else folder / _ONNX_FOLDER
    places = [("", folder), ("around/", around)]
    beside = {start + p.name: p for start, place in places if place.is_dir() for p in sorted(place.iterdir())}
    chosen = {"chosen": model} if model.is_file() else {}
    return {name: p for name, p in (beside | chosen).items() if p.is_file()}


def _digests(path: Path) -> dict[str, str]:
    """The digests of a file, or of the files of a directory. The build reports a missing one."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: _remembered_digest(file) for file in files if file.is_file()}


def _remembered_digest(file: Path) -> str:
    """A file's digest. Reading gigabytes takes seconds, so the digest is cached with the engines until the file
    changes."""
    status = file.stat()
    identity = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ino}\n{status.st_dev}"
    name = sha256(identity.encode()).hexdigest()
    memos = open_cache(CacheKind.DIGESTS)
    remembered = memos.read_text(name)
    if remembered is not None and len(remembered) == 64:
        return remembered
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    with suppress(OSError):  # A full disk costs reading the file again.
        memos.write_text(name, digest)
    return digest
