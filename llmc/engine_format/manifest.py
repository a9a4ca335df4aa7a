"""manifest.json: what an engine is, and the size and hashes of every file in it."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from llmc.errors import EngineFormatError
from llmc.files.regular_file import read_regular
from llmc.files.typed_json import REBUILD, from_json, to_json
from llmc.program import Head, Limits
from llmc.targets import Target

FORMAT = "llmc-engine"
FORMAT_VERSION = 10
MANIFEST_NAME = "manifest.json"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelRecord:
    """The model that an engine was built from.

    family: the HF model_type, or "module". max_positions: the model's own limit in tokens, None without one.
    dtype: the dtype of weights and activations, as torch spells it. parameters: how many numbers the weights hold.
    head: what it gives for a text, None for a model that gives logits.
    """

    name: str
    family: str
    vocab_size: int
    max_positions: int | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    parameters: int
    head: Head | None = None

    @property
    def row_width(self) -> int:
        """The number of columns of a logit row."""
        return self.vocab_size if self.head is None else self.head.width


@dataclass(frozen=True)
class TargetRecord:
    """Requirements on the machine that runs the engine. machine: the value of platform.machine(); None for any."""

    name: str
    machine: str | None
    features: tuple[str, ...]

    @staticmethod
    def of(target: Target) -> "TargetRecord":
        return TargetRecord(target.name, target.machine, tuple(sorted(target.features)))


@dataclass(frozen=True)
class FileRecord:
    """A file of the engine: its size in bytes, and the SHA-256 and XXH3 of each consecutive CHUNK_BYTES of it."""

    bytes: int
    sha256: tuple[str, ...]
    xxh3: tuple[str, ...]


@dataclass(frozen=True)
class PassRecord:
    """The result of one pass: the number of rewrites and of refused candidates."""

    name: str
    rewrites: int
    refusals: int


@dataclass(frozen=True)
class Manifest:
    """Everything in manifest.json except the format's name and version.

    options: the build options by name. cost: predicted figures of a step by name, such as bytes and FLOPs of one
    decode. memory: bytes by purpose. files: by path relative to the engine, with forward slashes; EngineWriter
    fills them in.
    """

    llmc_version: str
    model: ModelRecord
    target: TargetRecord
    options: dict[str, Any]
    limits: Limits
    cost: dict[str, float]
    memory: dict[str, int]
    passes: tuple[PassRecord, ...]
    files: dict[str, FileRecord] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Manifest of {self.model.name} for {self.target.name}: {len(self.files)} files>"


def manifest_text(manifest: Manifest) -> str:
    """The text of manifest.json, which ends in a digest of its content."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **to_json(manifest)}
    content["files"] = dict(sorted(content["files"].items()))
    content["manifest_sha256"] = content_digest(content)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_manifest(engine: Path) -> Manifest:
    """Parse and check an engine's manifest.json. Raises EngineFormatError."""
    path = engine / MANIFEST_NAME
    content = _read_object(path)
    if content.pop("format", None) != FORMAT:
        raise EngineFormatError(
            f"this is not an engine's manifest: its format is not {FORMAT!r}",
            at=path,
            fix="name a directory that `llmc build` made",
        )
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise EngineFormatError(
            f"the engine was written in format {version}, this llmc reads format {FORMAT_VERSION}",
            at=path,
            fix=f"rebuild it: llmc build MODEL -o {engine}",
        )
    digest = content.pop("manifest_sha256", None)
    if digest != content_digest({"format": FORMAT, "format_version": version, **content}):
        raise EngineFormatError("the manifest does not match its own digest", at=path, fix=REBUILD)
    manifest = from_json(Manifest, content, f"{path}: manifest")
    for name in manifest.files:
        check_file_name(name, path)
    return manifest


def is_engine(directory: Path) -> bool:
    """Whether the directory holds an engine of any format version, whole or not.

    A damaged manifest counts as an engine's unless a model is in the same directory; reading it reports the damage.
    """
    try:
        is_whole = _read_object(directory / MANIFEST_NAME).get("format") == FORMAT
    except EngineFormatError:
        is_whole = False
    return is_whole or ((directory / MANIFEST_NAME).is_file() and not (directory / "config.json").exists())


def check_file_name(name: str, at: Path) -> None:
    """Refuse a file name that could lead out of the engine directory."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or str(pure) != name or name == ".":
        raise EngineFormatError(f"the file name {name!r} is not allowed in an engine", at=at, fix=REBUILD)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, _MOST_BYTES).decode())
    except OSError as error:
        raise EngineFormatError(f"cannot read the manifest: {error.strerror}", at=path, fix=REBUILD) from None
    except (ValueError, RecursionError) as error:
        raise EngineFormatError(f"the manifest is not JSON: {error}", at=path, fix=REBUILD) from None
    if not isinstance(content, dict):
        raise EngineFormatError(f"the manifest is not a JSON object: {content!r:.80}", at=path, fix=REBUILD)
    return content


def content_digest(content: dict[str, Any]) -> str:
    """SHA-256 of the manifest's content without the digest itself, in a canonical form."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
