"""Which ONNX file a model is, and where what describes it stands. Imports nothing of the onnx package."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import SHARD_INDEX, SINGLE_FILE, read_json

SUFFIX = ".onnx"
GENAI = "genai_config.json"
# The folder of ONNX files in repositories on the hub, next to config.json.
_FOLDER = "onnx"
_PREFERRED = ("model.onnx", "decoder_with_past_model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx")


def onnx_file(place: Path) -> Path | None:
    """The file that a path means: an .onnx file itself, or of a directory that holds no other weights the one that
    genai_config.json names, or whose name is usual. None for any other path.

    Raises CheckpointError for a directory of several whose names say nothing.
    """
    if not place.is_dir():
        return place if place.suffix == SUFFIX else None
    if any((place / name).exists() for name in (SINGLE_FILE, SHARD_INDEX)):
        return None
    files = {file.name: file for folder in (place / _FOLDER, place) for file in sorted(folder.glob(f"*{SUFFIX}"))}
    if not files:
        return None
    settings = genai_settings(place)
    named = settings.get("decoder", {}).get("filename") if isinstance(settings.get("decoder"), dict) else None
    for name in (named, *_PREFERRED):
        if name in files:
            return files[name]
    if len(files) == 1:
        return next(iter(files.values()))
    raise CheckpointError(
        f"the directory holds {len(files)} ONNX files: {', '.join(files)[:200]}", at=place, fix="name the one to build"
    )


def describing(file: Path) -> Path:
    """The directory of the tokenizer and config.json: the file's own directory, or its parent if they are there."""
    folder = file.parent
    has_own = any((folder / name).is_file() for name in ("config.json", "tokenizer.json", GENAI))
    return folder.parent if folder.name == _FOLDER and not has_own else folder


def genai_settings(folder: Path) -> dict[str, Any]:
    """The settings of the model in genai_config.json; empty if there is none."""
    file = folder / GENAI
    if not file.is_file():
        return {}
    settings = read_json(file).get("model")
    return settings if isinstance(settings, dict) else {}
