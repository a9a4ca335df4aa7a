"""Build from a model that is saved as an archive, and say what became of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import llmc
from llmc.engine_format.reader import QUANTIZATION_NAME
from llmc.engines.engine_cache import engine_key
from tests.frontends.npz_checkpoint.archive import FILE, saved_archive
from tests.tiny_models import tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def built(folder: Path) -> tuple[list[str], float, bool]:
    """What an engine says of weights that are codes; how far its logits are from the model's; whether the engine cache
    notices a change of the archive."""
    model = tiny_model("llama", num_hidden_layers=1).float()
    directory = saved_archive(model, folder / "model")
    with llmc.compile(directory, target="reference", output=folder / "engine.llmc") as engine:
        logits = np.asarray(engine.logits(TOKENS))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    records = json.loads((folder / "engine.llmc" / QUANTIZATION_NAME).read_text())
    before = engine_key(directory, "cpu", {})
    (directory / FILE).write_bytes(b"others")
    is_noticed = engine_key(directory, "cpu", {}) != before
    return [record["scheme"] for record in records], float(np.abs(logits - expected).max()), is_noticed


if __name__ == "__main__":
    print(json.dumps(built(Path(sys.argv[1]))))
