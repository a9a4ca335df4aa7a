"""The files of a model directory: their names, and JSON from untrusted sources. Does not import torch."""

import json
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"
DOWNLOAD_AGAIN = "download the checkpoint again"


def has_safetensors(directory: Path) -> bool:
    """Whether a directory holds weights in safetensors files."""
    return any((directory / name).is_file() for name in (SINGLE_FILE, SHARD_INDEX))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the model directory; raises CheckpointError if it is not one."""
    value = _parsed(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a JSON {type(value).__name__}, not an object", at=file, fix=DOWNLOAD_AGAIN)
    return value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """Return the same as `read_json`, or an empty dict if the file does not exist."""
    return read_json(file) if file.is_file() else {}


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """A JSON list of objects; raises CheckpointError if it is not one."""
    value = _parsed(file)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CheckpointError("holds no JSON list of objects", at=file, fix=DOWNLOAD_AGAIN)
    return value


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"cannot read it as JSON: {error}", at=file, fix=DOWNLOAD_AGAIN) from None
