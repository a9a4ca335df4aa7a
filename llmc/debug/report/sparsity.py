"""Zeros as a report holds them: of each weight that has some, what it takes, what was lost and what decoding gains."""

from __future__ import annotations

from typing import Any

from llmc.debug.report.contents import EngineContents
from llmc.files.typed_json import to_json


def sparsity_data(contents: EngineContents) -> list[dict[str, Any]]:
    """As formats/sparse_weight.py has each weight, and its gain; empty for an engine whose weights have no zeros."""
    return [to_json(weight) | {"gain": weight.gain} for weight in contents.sparse]
