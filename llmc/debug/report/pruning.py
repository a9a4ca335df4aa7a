"""Pruning as a report holds it: what each part of the model lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.debug.report.contents import EngineContents
from llmc.files.typed_json import to_json


def pruning_data(contents: EngineContents) -> list[dict[str, Any]]:
    """As formats/pruned_part.py has each part, and which went in runs; empty for a model of which nothing went."""
    return [to_json(part) | {"runs": _runs(part.removed)} for part in contents.pruned]


def _runs(numbers: Sequence[int]) -> str:
    """1, 4–7, 9: of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
