"""Broken and unusual checkpoint directories, made by editing good ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to a JSON file in place."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace model.safetensors by what `change` makes of its tensors."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the header of a safetensors file and leave its data as it is."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def split_into_shards(directory: Path) -> tuple[Path, Path]:
    """Turn model.safetensors into two shards and an index; returns the shards."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    parts = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    first, second = (directory / file for file in parts)
    return first, second
