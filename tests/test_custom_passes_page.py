"""The Python of docs/custom-passes.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.tiny_models import tiny_model

PAGE = Path(__file__).parent.parent / "docs" / "custom-passes.md"


def test_its_passes_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"model": tiny_model("llama", num_hidden_layers=1)}
    for block in blocks:
        exec(block.replace("llmc.compile(model,", "llmc.compile(model, target='reference',"), names)
    with names["engine"] as engine, names["other"]:
        done = {record.name: record.rewrites for record in engine.manifest.passes}
    assert done["my_pass"] == 1 and done["my_graph_pass"] == 8
